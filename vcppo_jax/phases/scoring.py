"""From a rollout to the reward of each response: verifier or reward model, then the shaping of config.reward.

The moments of running normalisation are part of a phase's `meta`, so that a resumed run has them too, and
RL takes over those of the checkpoint that its value model comes from.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from vcppo_jax.algos.shaping import (
    RunningMoments,
    normalize_by_moments,
    scale_scores,
    soft_overlong_penalty,
    update_moments,
)
from vcppo_jax.config_load import ConfigError
from vcppo_jax.phases.collect import ScoredRollout
from vcppo_jax.phases.loop import Meta, Metrics
from vcppo_jax.phases.reward import RewardScorer
from vcppo_jax.phases.workspace import Workspace


class Rewards:
    """The rewards of a run's rollouts."""

    def __init__(self, workspace: Workspace, moments: list[float] | None = None) -> None:
        """`moments`: (count, mean, sum of squares) to go on from, those of the value model's checkpoint."""
        self._config = workspace.config
        self._section = section = workspace.config.reward
        self._scorer: RewardScorer | None = None
        if section.source == "model":
            assert section.model is not None  # refused when the config is read
            self._scorer = RewardScorer(workspace, section.model)
            if section.normalize == "reward_model" and self._scorer.score_std is None:
                raise ConfigError(
                    f"reward.normalize=reward_model: {section.model} does not say the mean and standard "
                    "deviation of its scores; give a reward phase (runs/x/reward), or use running"
                )
        self._start = [0.0, 0.0, 0.0] if moments is None else moments

    @property
    def by_model(self) -> bool:
        """Whether the scores are a reward model's: the device computes them, and no verdict is waited for."""
        return self._scorer is not None

    def scores(self, rollout: ScoredRollout) -> np.ndarray:
        """[B] float32, before any shaping: the verifier's +1 and -1, or the reward model's scores."""
        return rollout.scores if self._scorer is None else self._scorer(rollout.samples)

    def shape(
        self, scores: np.ndarray, rollout: ScoredRollout, meta: Meta, *, learn: bool = True
    ) -> tuple[np.ndarray, Meta, Metrics]:
        """(rewards [B] float32, meta, metrics) of `scores`; with `learn` they move the moments in meta on."""
        section = self._section
        metrics: Metrics = {}
        rewards: np.ndarray = np.asarray(scores, np.float32)
        if self._scorer is not None:
            metrics["reward_model/score/mean"] = float(rewards.mean())
        else:
            rewards = np.asarray(scale_scores(rewards, section.scale))
        if section.normalize == "running":
            moments = RunningMoments(*map(jnp.float32, meta.get("reward_moments", self._start)))
            if learn:
                moments = update_moments(moments, rewards, rollout.samples.lengths > 0)
                meta = meta | {"reward_moments": [float(x) for x in moments]}
            rewards = np.asarray(normalize_by_moments(rewards, moments))
        elif section.normalize == "reward_model":
            scorer = self._scorer
            assert scorer is not None
            assert scorer.score_mean is not None
            assert scorer.score_std is not None
            rewards = (rewards - scorer.score_mean) / scorer.score_std
        if section.clip is not None:
            metrics["reward/clipfrac"] = float((np.abs(rewards) > section.clip).mean())
            rewards = np.clip(rewards, -section.clip, section.clip)
        if section.overlong_buffer_share is not None:
            limit = self._config.rollout.max_new_tokens
            penalty = section.overlong_penalty * np.asarray(
                soft_overlong_penalty(
                    rollout.samples.lengths,
                    max_length=limit,
                    buffer=max(1, round(section.overlong_buffer_share * limit)),
                )
            )
            metrics["reward/overlong_penalty/mean"] = float(penalty.mean())
            rewards = rewards + penalty
        return np.asarray(rewards, np.float32), meta, metrics

    def loss_mask(self, rollout: ScoredRollout) -> np.ndarray:
        """[B, T] bool, the tokens that the policy learns from."""
        mask = rollout.samples.mask
        if self._section.overlong_filter:
            mask = mask & ~rollout.truncated[:, None]
        return mask
