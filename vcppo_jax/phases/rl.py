"""RL: VC-PPO, and PPO and GRPO on the same code.

One step, in this order: rollout, scores, old and reference log-probs, values, advantages and returns, the
critic's updates, the actor's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from vcppo_jax.data.prompts import RecordStream
from vcppo_jax.models.networks import Policy
from vcppo_jax.phases.artifacts import find_model, save_model_files
from vcppo_jax.phases.collect import ScoredRollout, collect, rollout_sampling
from vcppo_jax.phases.evaluate import accuracy, evaluate_policy
from vcppo_jax.phases.loop import Meta, Metrics, StepResult, Timer, mean_infos
from vcppo_jax.phases.networks import actor_learner, critic_learner, starting_value_model
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.train.experience import AdvantageSettings, build_experience, experience_metrics
from vcppo_jax.train.learner import Learner, Scorer
from vcppo_jax.train.objectives import LogprobScore, ValueScore
from vcppo_jax.types import Experience

_experience = jax.jit(build_experience, static_argnames="settings")
_metrics = jax.jit(experience_metrics)


def make_experience(
    settings: AdvantageSettings,
    rollout: ScoredRollout,
    old_logprobs: np.ndarray,
    ref_logprobs: np.ndarray,
    values: np.ndarray,
) -> tuple[Experience, Metrics]:
    """(experience as NumPy arrays [B, T], its metrics)."""
    experience, raw = _experience(
        rollout.scores, rollout.samples.mask, old_logprobs, ref_logprobs, values, settings=settings
    )
    metrics = {name: float(x) for name, x in jax.device_get(_metrics(experience, raw)).items()}
    return jax.device_get(experience), metrics


class RL:
    """The networks and data of an RL run; `step` is one step of its loop."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.config = workspace, workspace.config
        algorithm = self.config.algorithm
        self.policy = workspace.starting_policy()
        self.actor = actor_learner(workspace, self.policy.config)
        self.score_logprobs = Scorer(
            LogprobScore(self.policy.config, self.config.rollout.temperature), workspace.mesh
        )
        self.critic: Learner | None = None
        if algorithm.advantage == "gae":
            self.value_model, origin = starting_value_model(workspace, self.policy, "rl")
            workspace.progress.message(origin)
            self.head_bias = "bias" in self.value_model.params["score"]
            self.critic = critic_learner(
                workspace, self.value_model.config, head_bias=self.head_bias, phase="rl"
            )
            self.score_values = Scorer(ValueScore(self.value_model.config), workspace.mesh)
        self.reference = (
            jax.tree.map(lambda x: x.copy(), self.policy.params) if algorithm.kl_coef > 0 else None
        )
        self.stream = RecordStream(workspace.records("train"), seed=self.config.seed)
        self.validation = workspace.records("validation") if self.config.rl.evaluate_every else []
        self.settings = AdvantageSettings(
            advantage=algorithm.advantage,
            group_size=self.config.rollout.n,
            gamma=algorithm.gamma,
            lambda_actor=algorithm.lambda_actor,
            lambda_critic=algorithm.lambda_critic,
            whiten=algorithm.whiten_advantages,
            kl_reward_coef=algorithm.kl_coef if algorithm.kl_in == "reward" else 0.0,
            kl_kind=algorithm.kl_kind,
        )

    def initial_state(self) -> Any:
        """The states before the first update."""
        state = {"actor": self.actor.new_state(self.policy.params)}
        if self.critic is not None:
            state["critic"] = self.critic.new_state(self.value_model.params)
        return state

    def abstract_state(self) -> Any:
        """Shapes and shardings of the states."""
        state = {"actor": self.actor.abstract_state}
        if self.critic is not None:
            state["critic"] = self.critic.abstract_state
        return state

    def save_model_files(self) -> None:
        """Put what the checkpoints need to be loaded and exported beside them."""
        phase_dir = self.workspace.phase_dir("rl")
        save_model_files(phase_dir, "actor", self.workspace.model_dir, {})
        if self.critic is None:
            return
        section, config = self.config.value_model, self.config
        model_dir = self.workspace.model_dir
        if "value" in config.phases and section.init != "checkpoint":
            model_dir = self.workspace.run_dir / "value" / "value_model"
        elif section.path is not None:
            model_dir = find_model(section.path, "critic").model_dir
        save_model_files(phase_dir, "critic", model_dir, {"head_bias": self.head_bias})

    def evaluate(self, state: Any) -> tuple[Metrics, list[dict[str, Any]]]:
        """Metrics and samples on held-out problems."""
        policy = Policy(state["actor"].params, self.policy.config)
        return evaluate_policy(
            self.workspace, policy, self.validation, key=self.workspace.key("rl", "evaluate")
        )

    def step(self, step: int, state: Any, meta: Meta) -> StepResult:
        """One step; `state`'s buffers are donated to the updates at its end."""
        timer, config = Timer(), self.config
        rollout = collect(
            self.workspace,
            Policy(state["actor"].params, self.policy.config),
            self.stream.take((step - 1) * config.rl.prompts_per_step, config.rl.prompts_per_step),
            sampling=rollout_sampling(self.workspace),
            key=self.workspace.key("rl", "rollout", step),
            timer=timer,
            interruptible=True,
        )
        packing = rollout.samples.pack()
        with timer("old_log_prob"):
            old_logprobs = self.score_logprobs(state["actor"].params, packing)
        ref_logprobs = old_logprobs
        if self.reference is not None:
            with timer("ref"):
                ref_logprobs = self.score_logprobs(self.reference, packing)
        values = np.zeros_like(old_logprobs)
        if self.critic is not None:
            with timer("values"):
                values = self.score_values(state["critic"].params, packing)
        with timer("adv"):
            experience, statistics = make_experience(
                self.settings, rollout, old_logprobs, ref_logprobs, values
            )
        metrics = rollout.metrics() | self._relevant(statistics)
        state, infos = self._update(step, state, rollout, experience, timer)
        metrics |= infos
        best = metrics["critic/score/mean"]
        if config.rl.evaluate_every and (step % config.rl.evaluate_every == 0 or step == config.rl.steps):
            with timer("testing"):
                held_out, _ = self.evaluate(state)
            metrics |= held_out
        if config.rl.evaluate_every:
            best = accuracy(metrics)
        metrics |= timer.metrics()
        metrics["perf/total_num_tokens"] = packing.tokens
        metrics["perf/throughput"] = packing.tokens / metrics["timing_s/step"]
        return StepResult(
            state, meta, metrics, rollout.examples(config.logging.samples_per_step), best_metric=best
        )

    def _relevant(self, statistics: Metrics) -> Metrics:
        """Without a value model there are no values to report."""
        if self.critic is not None:
            return statistics
        return {k: v for k, v in statistics.items() if "/values/" not in k and "vf_" not in k}

    def _update(
        self, step: int, state: Any, rollout: ScoredRollout, experience: Experience, timer: Timer
    ) -> tuple[Any, Metrics]:
        config, new = self.config, {}
        metrics: Metrics = {}
        run = functools.partial(
            Learner.epochs,
            samples=rollout.samples,
            mini_batch_size=config.rl.mini_batch_size,
            where=f"rl step {step}",
        )
        if self.critic is not None:
            with timer("update_critic"):
                new["critic"], infos = run(
                    self.critic,
                    state["critic"],
                    fields={"returns": experience.returns, "old_values": experience.values},
                    epochs=config.critic.epochs,
                    aggregation=config.algorithm.value_aggregation,
                    seed=(config.seed, step, 0),
                )
            metrics |= mean_infos(infos, "critic/")
        fields = {"old_logprobs": experience.old_logprobs, "advantages": experience.advantages}
        if self.reference is not None and config.algorithm.kl_in == "loss":
            fields["ref_logprobs"] = experience.ref_logprobs
        with timer("update_actor"):
            new["actor"], infos = run(
                self.actor,
                state["actor"],
                fields=fields,
                epochs=config.actor.epochs,
                aggregation=config.algorithm.aggregation,
                seed=(config.seed, step, 1),
            )
        metrics |= mean_infos(infos, "actor/")
        metrics["actor/ratio_first_update"] = infos[0]["ratio_mean"]
        return new, metrics


def run(workspace: Workspace) -> None:
    """Train the policy (and its value model) for `rl.steps` steps."""
    workspace.begin("rl")
    rl = RL(workspace)
    rl.save_model_files()
    loop = workspace.loop(
        "rl", workspace.config.rl.steps, before=rl.evaluate if workspace.config.rl.evaluate_every else None
    )
    _, _, done = loop.run(rl.initial_state, rl.abstract_state(), rl.step)
    workspace.finish("rl", {"steps": done})
