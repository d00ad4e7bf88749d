"""Experience from a config and a rollout: the border between the phases and `train.experience`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from vcppo_jax.config import Config
from vcppo_jax.phases.collect import ScoredRollout
from vcppo_jax.phases.loop import Metrics
from vcppo_jax.sharding import named_sharding, put, to_host
from vcppo_jax.train.experience import (
    AdvantageSettings,
    build_experience,
    experience_metrics,
    position_profile,
)
from vcppo_jax.types import Experience

_experience = jax.jit(build_experience, static_argnames="settings")
_metrics = jax.jit(experience_metrics)
_profile = jax.jit(position_profile, static_argnames="settings")


def advantage_settings(config: Config) -> AdvantageSettings:
    """What config.algorithm says of advantages and returns."""
    algorithm = config.algorithm
    return AdvantageSettings(
        advantage=algorithm.advantage,
        group_size=config.rollout.n,
        score_mean=algorithm.score_mean,
        score_std=algorithm.score_std,
        gamma=algorithm.gamma,
        lambda_actor=algorithm.lambda_actor,
        length_adaptive_alpha=algorithm.length_adaptive_alpha,
        lambda_critic=algorithm.lambda_critic,
        whiten=algorithm.whitens,
        kl_in_reward=algorithm.kl_coef > 0 and algorithm.kl_in != "loss",
        kl_kind=algorithm.kl_kind,
    )


def make_experience(
    settings: AdvantageSettings,
    rollout: ScoredRollout,
    rewards: np.ndarray,
    loss_mask: np.ndarray,
    old_logprobs: np.ndarray | None,
    ref_logprobs: np.ndarray | None,
    values: np.ndarray,
    kl_coef: float,
) -> tuple[Experience, Metrics, np.ndarray]:
    """(experience as NumPy arrays [B, T], its metrics, advantages before whitening); None is all zeros."""
    zeros = np.zeros_like(values)
    old = zeros if old_logprobs is None else old_logprobs
    ref = zeros if ref_logprobs is None else ref_logprobs
    mesh = jax.sharding.get_mesh()
    arrays = (rewards, rollout.samples.mask, loss_mask, old, ref, values)
    if not mesh.empty:
        arrays = tuple(put(x, _by_response(mesh, x.shape)) for x in arrays)
    experience, raw = _experience(*arrays, np.float32(kl_coef), settings=settings)
    metrics = {name: float(x) for name, x in to_host(_metrics(experience, raw)).items()}
    return to_host(experience), metrics, to_host(raw)


def _by_response(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Arrays [B, ...] split over the responses: of 8192 with 16k tokens each is half a GiB."""
    return named_sharding(mesh, ("batch", *[None] * (len(shape) - 1)), shape)


def trace_experience(config: Config, mesh: Mesh, responses: int) -> jax.stages.Traced:
    """What makes a step's advantages and returns, for compiling it ahead of time."""

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=_by_response(mesh, shape))

    size = (responses, config.rollout.max_new_tokens)
    mask, numbers = array(np.bool_, *size), array(np.float32, *size)
    kl_coef = jax.ShapeDtypeStruct((), np.float32)
    return _experience.trace(
        array(np.float32, responses),
        mask,
        mask,
        numbers,
        numbers,
        numbers,
        kl_coef,
        settings=advantage_settings(config),
    )


def positions(experience: Experience, raw: np.ndarray, settings: AdvantageSettings) -> dict[str, Any]:
    """What positions.json holds: values, advantages and the weight of the last reward, by token position."""
    profile = to_host(_profile(experience, raw, settings=settings))
    lists = {name: np.asarray(x).tolist() for name, x in profile.items()}
    return {
        "by_position": {name: lists[name] for name in ("values", "advantages", "count")},
        "by_distance_to_end": {"reward_weight": lists["reward_weight"], "count": lists["distance_count"]},
        "gamma": settings.gamma,
        "lambda_actor": settings.lambda_actor,
        "length_adaptive_alpha": settings.length_adaptive_alpha,
    }


def engine_metrics(trainer_logprobs: np.ndarray, rollout: ScoredRollout) -> Metrics:
    """How far the engine's log-probs of the sampled tokens are from the trainer's."""
    difference = np.abs(trainer_logprobs - rollout.engine_logprobs)[rollout.samples.mask]
    return {
        "rollout/logprob_diff/mean": float(difference.mean()),
        "rollout/logprob_diff/max": float(difference.max()),
    }
