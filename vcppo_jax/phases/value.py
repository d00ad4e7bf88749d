"""Value-pretraining (VC-PPO, arXiv 2503.01491): a frozen policy, a value model fit to Monte-Carlo returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vcppo_jax.algos.losses import token_weights, value_loss
from vcppo_jax.algos.masked import explained_variance
from vcppo_jax.data.prompts import RecordStream
from vcppo_jax.phases.artifacts import save_model_files
from vcppo_jax.phases.collect import ScoredRollout, collect, rollout_sampling
from vcppo_jax.phases.experience import advantage_settings, make_experience
from vcppo_jax.phases.loop import Meta, Metrics, StepResult, Timer, mean_infos
from vcppo_jax.phases.networks import (
    critic_learner,
    starting_moments,
    starting_value_model,
    value_model_dir,
)
from vcppo_jax.phases.scoring import Rewards
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.train.learner import Scorer
from vcppo_jax.train.minibatches import mini_batches
from vcppo_jax.train.objectives import ValueScore


def settled(
    history: list[list[float]], *, window: int, loss_tolerance: float, variance_tolerance: float
) -> bool:
    """Whether the last `window` of the (value loss, explained variance) pairs brought nothing new.

    That is: the best loss among them is not below the best before by more than `loss_tolerance` of it, and
    the best explained variance not above the best before by more than `variance_tolerance`.
    """
    if len(history) <= window:
        return False
    before, last = np.asarray(history[:-window]), np.asarray(history[-window:])
    loss_fell = last[:, 0].min() < before[:, 0].min() * (1 - loss_tolerance)
    variance_rose = last[:, 1].max() > before[:, 1].max() + variance_tolerance
    return not (loss_fell or variance_rose)


class HeldOut:
    """Rollouts of the frozen policy, sampled once, on which the value model is measured."""

    def __init__(self, rollout: ScoredRollout, scores: np.ndarray, scorer: Scorer, gamma: float) -> None:
        self.rollout, self.scores, self._scorer = rollout, scores, scorer
        self._packing = rollout.samples.pack()
        # The reward sits on the last token: reward-to-go decays from it by gamma per token.
        left = rollout.samples.lengths[:, None] - 1 - np.arange(rollout.samples.mask.shape[1])[None]
        self._decay = gamma ** np.maximum(left, 0).astype(np.float32)

    def measure(self, params: Any, rewards: np.ndarray) -> Metrics:
        """Value loss and explained variance, with `rewards` [B] for the rollouts' `scores`."""
        values, mask = self._scorer(params, self._packing), self.rollout.samples.mask
        returns = rewards[:, None] * self._decay
        weights = token_weights(mask, aggregation="token-mean")
        loss, _ = value_loss(values, None, returns, mask, clip=None, weights=weights)
        return {
            "held_out/vf_loss": float(loss),
            "held_out/vf_explained_var": float(explained_variance(values, returns, mask)),
        }


class ValuePretraining:
    """The frozen policy, the value model and the data; `step` is one step of the phase's loop."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.config = workspace, workspace.config
        self.policy = workspace.starting_policy()
        self.value_model, self.origin = starting_value_model(workspace, self.policy, "value")
        workspace.progress.message(self.origin)
        self.head_bias = "bias" in self.value_model.params["score"]
        self.critic = critic_learner(
            self.config,
            workspace.mesh,
            self.value_model.config,
            workspace.progress.message,
            head_bias=self.head_bias,
            phase="value",
        )
        self.scorer = Scorer(ValueScore(self.value_model.config), workspace.mesh)
        records = workspace.records("train")
        self.stream = RecordStream(records, seed=self.config.seed)
        validation = workspace.records("validation")
        self.held_out_records = (validation or records)[: self.config.value.held_out_prompts]
        self.held_out: HeldOut | None = None
        self.rewards = Rewards(workspace, starting_moments(workspace, "value"))
        # Monte-Carlo returns, whatever RL uses later; the policy is its own reference, so there is no KL.
        self.settings = dataclasses.replace(
            advantage_settings(self.config),
            advantage="gae",
            lambda_critic=1.0,
            whiten=False,
            kl_in_reward=False,
        )

    def measure(self, state: Any, meta: Meta, *, interruptible: bool = False) -> Metrics:
        """Value loss and explained variance on the held-out rollouts, which the first call samples."""
        if self.held_out is None:
            rollout = collect(
                self.workspace,
                self.policy,
                self.held_out_records,
                sampling=rollout_sampling(self.config),
                key=self.workspace.key("value", "held_out"),
                timer=Timer(),
                interruptible=interruptible,
            )
            scores = self.rewards.scores(rollout)
            self.held_out = HeldOut(rollout, scores, self.scorer, self.config.algorithm.gamma)
        kept = self.held_out
        shaped, _, _ = self.rewards.shape(kept.scores, kept.rollout, meta, learn=False)
        return kept.measure(state["critic"].params, shaped)

    def step(self, step: int, state: Any, meta: Meta) -> StepResult:
        """One step: fresh samples, their returns, the value model's updates, the held-out measurement."""
        timer, section = Timer(), self.config.value
        # The state has them, or others, of a checkpoint: then these would be a second copy.
        self.value_model = dataclasses.replace(self.value_model, params=None)
        rollout = collect(
            self.workspace,
            self.policy,
            self.stream.take((step - 1) * section.prompts_per_step, section.prompts_per_step),
            sampling=rollout_sampling(self.config),
            key=self.workspace.key("value", "rollout", step),
            timer=timer,
            interruptible=True,
        )
        if self.rewards.by_model:
            with timer("reward"):
                scores = self.rewards.scores(rollout)
        with timer("values"):
            values = self.scorer(state["critic"].params, rollout.samples.pack())
        with timer("verify"):  # until here the verifier worked beside the device
            metrics = rollout.metrics()
        if not self.rewards.by_model:
            scores = self.rewards.scores(rollout)
        with timer("adv"):
            shaped, meta, reward_metrics = self.rewards.shape(scores, rollout, meta)
            experience, statistics, _ = make_experience(
                self.settings, rollout, shaped, rollout.samples.mask, None, None, values, 0.0
            )
        batches = mini_batches(
            rollout.samples,
            {"returns": experience.returns, "old_values": values},
            epochs=self.config.critic.epochs,
            mini_batch_size=section.mini_batch_size,
            aggregation=self.config.algorithm.value_aggregation,
            norm_length=self.config.rollout.max_new_tokens,
            seed=(self.config.seed, step),
        )
        with timer("update_critic"):
            critic, infos = self.critic.steps(state["critic"], batches, f"value step {step}")
        state = {"critic": critic}
        metrics |= reward_metrics | statistics | mean_infos(infos, "critic/")
        stop, loss = False, None
        if step % section.held_out_every == 0:
            with timer("held_out"):
                metrics |= self.measure(state, meta)
            loss = metrics["held_out/vf_loss"]
            history = [*meta.get("history", []), [loss, metrics["held_out/vf_explained_var"]]]
            meta = meta | {"history": history}
            stop = section.settle and settled(
                history,
                window=section.settle_window,
                loss_tolerance=section.settle_loss_tolerance,
                variance_tolerance=section.settle_variance_tolerance,
            )
        metrics |= timer.metrics()
        examples = rollout.examples(self.config.logging.samples_per_step)
        return StepResult(state, meta, metrics, examples, best_metric=loss, stop=stop)


def run(workspace: Workspace) -> None:
    """Train the value model alone until `value.steps`, or until it has settled."""
    section, phase_dir = workspace.config.value, workspace.begin("value")
    phase = ValuePretraining(workspace)
    save_model_files(phase_dir, "critic", value_model_dir(workspace, "value"), {"head_bias": phase.head_bias})
    loop = workspace.loop(
        "value",
        section.steps,
        best_mode="min",
        keep_steps=section.checkpoint_steps,
        before=lambda state: (phase.measure(state, {}, interruptible=True), []),
    )
    state, meta, done = loop.run(
        lambda: {"critic": phase.critic.new_state(phase.value_model.params)},
        {"critic": phase.critic.abstract_state},
        phase.step,
    )
    if done < section.steps:
        workspace.progress.message(f"value: settled after {done} steps")
    workspace.finish("value", {"steps": done, "origin": phase.origin, **phase.measure(state, meta)})
