"""RL: VC-PPO, and what it is compared with, on the same code.

One step, in this order: rollout, old and reference log-probs, rewards, values, advantages and returns, the
critic's updates, the actor's. The verifier works while the device computes log-probs and values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from vcppo_jax.algos.policy import importance_weights
from vcppo_jax.algos.shaping import adaptive_kl_coef
from vcppo_jax.data.prompts import RecordStream
from vcppo_jax.models.networks import Policy
from vcppo_jax.models.specs import weight_specs
from vcppo_jax.phases.artifacts import resharded, save_model_files
from vcppo_jax.phases.collect import ScoredRollout, VariedRollout, collect, collect_varied, rollout_sampling
from vcppo_jax.phases.evaluate import accuracy, evaluate_policy
from vcppo_jax.phases.experience import advantage_settings, engine_metrics, make_experience, positions
from vcppo_jax.phases.loop import Meta, Metrics, StepResult, Timer, mean_infos, write_json
from vcppo_jax.phases.networks import (
    actor_learner,
    critic_learner,
    starting_moments,
    starting_value_model,
    updates_in,
    value_model_dir,
)
from vcppo_jax.phases.scoring import Rewards
from vcppo_jax.phases.sft import demonstration_samples
from vcppo_jax.phases.utilisation import step_flops, utilisation
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.train.learner import Learner, Scorer
from vcppo_jax.train.minibatches import Samples, mini_batches
from vcppo_jax.train.objectives import LogprobScore, ValueScore
from vcppo_jax.types import Experience


class RL:
    """The networks and data of an RL run; `step` is one step of its loop."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.config = workspace, workspace.config
        algorithm = self.config.algorithm
        self.policy = workspace.starting_policy()
        self.actor = actor_learner(
            self.config, workspace.mesh, self.policy.config, workspace.progress.message
        )
        self.score_logprobs = Scorer(
            LogprobScore(self.policy.config, self.config.rollout.temperature), workspace.mesh
        )
        self.critic: Learner | None = None
        if algorithm.advantage == "gae":
            self.value_model, origin = starting_value_model(workspace, self.policy, "rl")
            workspace.progress.message(origin)
            self.head_bias = "bias" in self.value_model.params["score"]
            self.critic = critic_learner(
                self.config,
                workspace.mesh,
                self.value_model.config,
                workspace.progress.message,
                head_bias=self.head_bias,
                phase="rl",
            )
            self.score_values = Scorer(ValueScore(self.value_model.config), workspace.mesh)
        self.reference = self._reference() if algorithm.kl_coef > 0 else None
        self.stream = RecordStream(workspace.records("train"), seed=self.config.seed)
        self.validation = workspace.records("validation") if self.config.rl.evaluate_every else []
        self.settings = advantage_settings(self.config)
        self.rewards = Rewards(workspace, starting_moments(workspace, "rl"))
        self.demonstrations = (
            RecordStream(workspace.demonstrations(), seed=self.config.seed)
            if algorithm.sft_coef > 0
            else None
        )

    def _reference(self) -> Any:
        """The starting policy's weights, as they are read: every use of them casts to the compute dtype."""
        model = self.policy.config
        return resharded(
            self.policy.params,
            weight_specs(model, head="lm"),
            self.workspace.mesh,
            layout=self.config.mesh.layout.reference,
            dtype=model.compute_dtype,
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
        model_dir = value_model_dir(self.workspace, "rl")
        save_model_files(phase_dir, "critic", model_dir, {"head_bias": self.head_bias})

    def evaluate(self, state: Any, *, interruptible: bool = False) -> tuple[Metrics, list[dict[str, Any]]]:
        """Metrics and samples on held-out problems."""
        return evaluate_policy(
            self.workspace,
            Policy(state["actor"].params, self.policy.config),
            self.validation,
            key=self.workspace.key("rl", "evaluate"),
            interruptible=interruptible,
        )

    def step(self, step: int, state: Any, meta: Meta) -> StepResult:
        """One step; `state`'s buffers are donated to the updates at its end."""
        timer, config = Timer(), self.config
        # The state has them, or others, of a checkpoint: then these would be a second copy.
        self.policy = dataclasses.replace(self.policy, params=None)
        if self.critic is not None:
            self.value_model = dataclasses.replace(self.value_model, params=None)
        collected = self._collect(step, state, meta.get("position", 0), timer)
        rollout, meta = collected.rollout, meta | {"position": collected.position}
        with timer("old_log_prob"):
            packing = rollout.samples.pack()
            old_logprobs = self.score_logprobs(state["actor"].params, packing)
        ref_logprobs = old_logprobs
        if self.reference is not None:
            with timer("ref"):
                ref_logprobs = self.score_logprobs(self.reference, packing)
        if self.rewards.by_model:
            with timer("reward"):
                scores = self.rewards.scores(rollout)
        values = np.zeros_like(old_logprobs)
        if self.critic is not None:
            with timer("values"):
                values = self.score_values(state["critic"].params, packing)
        with timer("verify"):  # until here the verifier worked beside the device
            metrics = rollout.metrics() | collected.metrics
        if not self.rewards.by_model:
            scores = self.rewards.scores(rollout)
        kl_coef = meta.get("kl_coef", config.algorithm.kl_coef)
        with timer("adv"):
            rewards, meta, reward_metrics = self.rewards.shape(scores, rollout, meta)
            loss_mask = self.rewards.loss_mask(rollout)
            experience, statistics, raw = make_experience(
                self.settings, rollout, rewards, loss_mask, old_logprobs, ref_logprobs, values, kl_coef
            )
            if step == 1 and self.critic is not None:
                file = self.workspace.phase_dir("rl") / "positions.json"
                write_json(file, positions(experience, raw, self.settings))
            metrics |= reward_metrics | self._relevant(statistics)
            metrics |= engine_metrics(old_logprobs, rollout)
            if self.reference is not None:
                adapts = step > config.rl.critic_warmup_steps  # until then the two are one
                meta, kl_metrics = self._kl(old_logprobs, ref_logprobs, rollout, kl_coef, meta, adapts=adapts)
                metrics |= kl_metrics
        state, infos = self._update(step, state, rollout, experience, loss_mask, kl_coef, timer)
        metrics |= infos
        # With dynamic sampling the score is that of chosen prompts, near 0 whatever the policy.
        best = metrics.get("dynamic_sampling/acc/mean", metrics["critic/score/mean"])
        if config.rl.evaluate_every and (step % config.rl.evaluate_every == 0 or step == config.rl.steps):
            with timer("testing"):
                held_out, _ = self.evaluate(state)
            metrics |= held_out
        if config.rl.evaluate_every:
            best = accuracy(metrics)
        metrics |= timer.metrics()
        metrics["perf/total_num_tokens"] = packing.tokens
        seconds = metrics["timing_s/step"] - metrics.get("timing_s/testing", 0.0)
        metrics["perf/throughput"] = packing.tokens / seconds
        metrics |= utilisation(
            config,
            step_flops(
                config,
                self.policy.config,
                None if self.critic is None else self.value_model.config,
                packing.lengths,
                has_reference=self.reference is not None,
                trains_actor=step > config.rl.critic_warmup_steps,
            ),
            seconds,
        )
        return StepResult(
            state, meta, metrics, rollout.examples(config.logging.samples_per_step), best_metric=best
        )

    def _collect(self, step: int, state: Any, position: int, timer: Timer) -> VariedRollout:
        """The step's rollout, from the prompts at `position` on."""
        config, prompts = self.config, self.config.rl.prompts_per_step
        policy = Policy(state["actor"].params, self.policy.config)

        def sample(round_: int, at: int) -> ScoredRollout:
            names: tuple[str | int, ...] = ("round", round_) if round_ else ()
            return collect(
                self.workspace,
                policy,
                self.stream.take(at, prompts),
                sampling=rollout_sampling(self.config),
                key=self.workspace.key("rl", "rollout", step, *names),
                timer=timer,
                interruptible=True,
                int8_weights=config.rollout.int8_weights,
            )

        if not config.rl.dynamic_sampling:
            return VariedRollout(sample(0, position), position + prompts, {})

        def judged(round_: int, at: int) -> ScoredRollout:
            rollout = sample(round_, at)
            with timer("verify"):  # which groups are kept, and how many are missing, hangs on the verdicts
                rollout.judge()
            return rollout

        return collect_varied(
            judged,
            position=position,
            prompts=prompts,
            group_size=config.rollout.n,
            rounds=config.rl.dynamic_sampling_rounds,
        )

    def _kl(
        self,
        old: np.ndarray,
        ref: np.ndarray,
        rollout: ScoredRollout,
        kl_coef: float,
        meta: Meta,
        *,
        adapts: bool,
    ) -> tuple[Meta, Metrics]:
        """(meta with the next step's coefficient, metrics): KL to the reference, k1, mean over tokens."""
        kl = float((old - ref)[rollout.samples.mask].mean())
        metrics = {"critic/kl": kl, "critic/kl_coef": kl_coef}
        algorithm = self.config.algorithm
        if algorithm.kl_target is not None and adapts:
            meta = meta | {
                "kl_coef": adaptive_kl_coef(
                    kl_coef,
                    kl,
                    target=algorithm.kl_target,
                    horizon=algorithm.kl_horizon,
                    samples=len(rollout.samples),
                )
            }
        return meta, metrics

    def _relevant(self, statistics: Metrics) -> Metrics:
        """Without a value model there are no values, and no returns for them, to report."""
        if self.critic is not None:
            return statistics
        unused = ("/values/", "/returns/", "vf_")
        return {k: v for k, v in statistics.items() if not any(part in k for part in unused)}

    def _update(
        self,
        step: int,
        state: Any,
        rollout: ScoredRollout,
        experience: Experience,
        loss_mask: np.ndarray,
        kl_coef: float,
        timer: Timer,
    ) -> tuple[Any, Metrics]:
        config, algorithm, new = self.config, self.config.algorithm, dict(state)
        common: dict[str, Any] = {
            "mini_batch_size": config.rl.mini_batch_size,
            "norm_length": config.rollout.max_new_tokens,
        }
        metrics: Metrics = {}
        if self.critic is not None:
            batches = mini_batches(
                rollout.samples,
                {"returns": experience.returns, "old_values": experience.values},
                epochs=config.critic.epochs,
                aggregation=algorithm.value_aggregation,
                seed=(config.seed, step, 0),
                **common,
            )
            with timer("update_critic"):
                new["critic"], infos = self.critic.steps(state["critic"], batches, f"rl step {step}")
            metrics |= mean_infos(infos, "critic/")
        if step <= config.rl.critic_warmup_steps:
            return new, metrics
        fields = {"old_logprobs": experience.old_logprobs, "advantages": experience.advantages}
        kl_in_loss = self.reference is not None and algorithm.kl_in != "reward"
        if kl_in_loss:
            fields["ref_logprobs"] = experience.ref_logprobs
        if algorithm.importance_correction != "none":
            fields["importance"] = importance_weights(
                experience.old_logprobs,
                rollout.engine_logprobs,
                rollout.samples.mask,
                level=algorithm.importance_correction,
                cap=algorithm.importance_cap,
            )
        batches = mini_batches(
            rollout.samples,
            fields,
            epochs=config.actor.epochs,
            aggregation=algorithm.aggregation,
            seed=(config.seed, step, 1),
            loss_mask=loss_mask,
            kl_coef=kl_coef if kl_in_loss else None,
            positive=rollout.scores > 0 if algorithm.positive_nll_coef > 0 else None,
            demonstrations=self._demonstrations(step) if self.demonstrations is not None else None,
            **common,
        )
        with timer("update_actor"):
            new["actor"], infos = self.actor.steps(state["actor"], batches, f"rl step {step}")
        if infos:  # none where every response was filtered
            metrics |= mean_infos(infos, "actor/")
            metrics["actor/ratio_first_update"] = infos[0]["ratio_mean"]
        return new, metrics

    def _demonstrations(self, step: int) -> Any:
        """From the number of a mini-batch in this step to the demonstrations that join it."""
        config, stream = self.config, self.demonstrations
        assert stream is not None
        samples = config.rl.prompts_per_step * config.rollout.n
        before = updates_in(step - 1, samples, config.rl.mini_batch_size, config.actor.epochs)
        size = config.algorithm.sft_batch_size

        def take(number: int) -> Samples:
            return demonstration_samples(self.workspace, stream.take((before + number) * size, size))

        return take


def run(workspace: Workspace) -> None:
    """Train the policy (and its value model) for `rl.steps` steps."""
    workspace.begin("rl")
    rl = RL(workspace)
    rl.save_model_files()
    before = functools.partial(rl.evaluate, interruptible=True)
    loop = workspace.loop(
        "rl", workspace.config.rl.steps, before=before if workspace.config.rl.evaluate_every else None
    )
    _, _, done = loop.run(rl.initial_state, rl.abstract_state(), rl.step)
    workspace.finish("rl", {"steps": done})
