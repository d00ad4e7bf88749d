"""Our actor and critic, built as the RL phase builds them, and one iteration of PPO with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from common import (
    ADAMW,
    CLIP,
    GAMMA,
    LAMBDA,
    MAX_GRAD_NORM,
    PAD,
    VALUE_CLIP,
    Answer,
    Stages,
    rewards_of,
)
from jax.sharding import Mesh

from vcppo_jax.data.packing import pack_shape
from vcppo_jax.models.hf import load_policy
from vcppo_jax.models.networks import Policy, ValueModel
from vcppo_jax.models.specs import weight_specs
from vcppo_jax.phases.artifacts import value_model_from_policy
from vcppo_jax.rollout.engine import generate
from vcppo_jax.rollout.sampling import Sampling
from vcppo_jax.sharding import DEFAULT_LAYOUT, make_mesh
from vcppo_jax.train.experience import AdvantageSettings, build_experience
from vcppo_jax.train.learner import Learner, Scorer
from vcppo_jax.train.minibatches import Samples, mini_batches
from vcppo_jax.train.objectives import LogprobScore, PolicyObjective, ValueObjective, ValueScore
from vcppo_jax.train.optimizer import learning_rate_schedule, make_optimizer


class Networks(NamedTuple):
    """The first weights, the compiled passes over packed rows, and what updates each network."""

    mesh: Mesh
    policy: Policy
    value_model: ValueModel
    score_logprobs: Scorer
    score_values: Scorer
    actor: Learner
    critic: Learner


def make_networks(path: str, remat: str) -> Networks:
    """The policy of a Hugging Face directory, and a value model with its decoder and a head of zeros."""
    mesh = make_mesh({}, jax.devices()[:1])
    policy = load_policy(path, remat=remat, mesh=mesh)
    config = policy.config
    value_model, _ = value_model_from_policy(policy, mesh, layout=DEFAULT_LAYOUT, head_bias=False)
    settings: dict[str, Any] = dict(ADAMW)
    schedule = learning_rate_schedule(
        learning_rate=settings.pop("learning_rate"), warmup_steps=0, schedule="constant", updates=1
    )
    optimizer = make_optimizer(schedule, **settings, max_grad_norm=MAX_GRAD_NORM)
    actor_objective = PolicyObjective(
        config=config,
        temperature=1.0,
        policy_loss="ppo",
        clip_low=CLIP,
        clip_high=CLIP,
        dual_clip=None,
        importance=False,
        kl_kind=None,
        entropy_coef=0.0,
        positive_nll_coef=0.0,
        sft_coef=0.0,
    )
    objectives = {"actor": actor_objective, "critic": ValueObjective(config=config, clip=VALUE_CLIP)}
    specs = {
        "actor": weight_specs(config, head="lm"),
        "critic": weight_specs(config, head="value", head_bias=False),
    }
    actor, critic = (
        Learner(name, specs[name], objectives[name], optimizer, mesh, max_skipped=1)
        for name in ("actor", "critic")
    )
    return Networks(
        mesh,
        policy,
        value_model,
        Scorer(LogprobScore(config, temperature=1.0), mesh),
        Scorer(ValueScore(config), mesh),
        actor,
        critic,
    )


GAE = AdvantageSettings(
    advantage="gae",
    group_size=1,
    score_mean="none",
    score_std="none",
    gamma=GAMMA,
    lambda_actor=LAMBDA,
    length_adaptive_alpha=None,
    lambda_critic=LAMBDA,  # the peers have one lambda
    whiten=True,
    kl_in_reward=False,
    kl_kind="k1",
)
_experience = jax.jit(build_experience, static_argnames="settings")


def make_iteration(path: str, work: Answer) -> Callable[[list[list[int]], int, Stages], Answer]:
    """From (prompts, seed, stages) to what iteration.py wants to know of an iteration."""
    networks = make_networks(path, work["remat"])
    config = networks.policy.config
    states = {
        "actor": networks.actor.new_state(networks.policy.params),
        "critic": networks.critic.new_state(networks.value_model.params),
    }
    longest = work["prompt_tokens"] + work["cap"]

    def iterate(prompts: list[list[int]], seed: int, stage: Stages) -> Answer:
        with stage("generate"):
            rollout = generate(
                Policy(states["actor"].params, config),
                prompts,
                sampling=Sampling(max_new_tokens=work["cap"], temperature=1.0),
                key=jax.random.key(seed),
                eos_ids=(work["eos"],),
                pad_id=PAD,
                batch_size=work["batch"],
            )
        samples = Samples(
            prompts,
            np.asarray(rollout.tokens),
            np.asarray(rollout.lengths),
            lambda count: pack_shape(
                sequences=count, row_tokens=longest, micro_batch_tokens=longest, shards=1
            ),
        )
        with stage("old_log_prob"):
            packing = samples.pack()
            old_logprobs = networks.score_logprobs(states["actor"].params, packing)
        with stage("values"):
            values = networks.score_values(states["critic"].params, packing)
        with stage("adv"):
            experience, _ = jax.device_get(
                _experience(
                    rewards_of(len(prompts)),
                    samples.mask,
                    samples.mask,
                    old_logprobs,
                    old_logprobs,
                    values,
                    0.0,
                    settings=GAE,
                )
            )
        fields = {
            "critic": {"old_values": values, "returns": experience.returns},
            "actor": {"old_logprobs": old_logprobs, "advantages": experience.advantages},
        }
        losses = {}
        for learner in (networks.critic, networks.actor):
            with stage(f"update_{learner.name}"):
                batches = mini_batches(
                    samples,
                    fields[learner.name],
                    epochs=1,
                    mini_batch_size=work["mini_batch"],
                    aggregation="token-mean",
                    norm_length=work["cap"],
                    seed=(0,),
                )
                states[learner.name], infos = learner.steps(states[learner.name], batches, "benchmark")
            losses[learner.name] = [info["loss"] for info in infos]
        positions = packing.tokens / np.mean([info["packing_efficiency"] for info in infos])
        return {"lengths": samples.lengths.tolist(), "losses": losses, "positions": float(positions)}

    return iterate
