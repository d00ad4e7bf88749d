"""Value-pretraining (VC-PPO, arXiv 2503.01491): a frozen policy, a value model fit to Monte-Carlo returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vcppo_jax.algos.losses import token_weights, value_loss
from vcppo_jax.algos.masked import explained_variance
from vcppo_jax.data.prompts import RecordStream
from vcppo_jax.phases.artifacts import find_model, save_model_files
from vcppo_jax.phases.collect import ScoredRollout, collect, rollout_sampling
from vcppo_jax.phases.experience import advantage_settings, make_experience
from vcppo_jax.phases.loop import Meta, Metrics, StepResult, Timer, mean_infos
from vcppo_jax.phases.networks import critic_learner, starting_value_model
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


def run(workspace: Workspace) -> None:
    """Train the value model alone until `value.steps`, or until it has settled."""
    config, section = workspace.config, workspace.config.value
    phase_dir = workspace.begin("value")
    policy = workspace.starting_policy()
    value_model, origin = starting_value_model(workspace, policy, "value")
    workspace.progress.message(origin)
    bias = "bias" in value_model.params["score"]
    critic = critic_learner(workspace, value_model.config, head_bias=bias, phase="value")
    scorer = Scorer(ValueScore(value_model.config), workspace.mesh)
    source = config.value_model.path if config.value_model.init != "policy" else None
    model_dir = workspace.model_dir if source is None else find_model(source, "critic").model_dir
    save_model_files(phase_dir, "critic", model_dir, {"head_bias": bias})
    records = workspace.records("train")
    stream = RecordStream(records, seed=config.seed)
    held_out_records = (workspace.records("validation") or records)[: section.held_out_prompts]
    rewards = Rewards(workspace)
    # Monte-Carlo returns, whatever RL uses later; the policy is its own reference, so there is no KL.
    settings = dataclasses.replace(
        advantage_settings(config), lambda_critic=1.0, whiten=False, kl_in_reward=False
    )
    sample = rollout_sampling(workspace)
    held_out: list[HeldOut] = []

    def measure(state: Any, meta: Meta) -> Metrics:
        if not held_out:
            rollout = collect(
                workspace,
                policy,
                held_out_records,
                sampling=sample,
                key=workspace.key("value", "held_out"),
                timer=Timer(),
                interruptible=False,
            )
            held_out.append(HeldOut(rollout, rewards.scores(rollout), scorer, config.algorithm.gamma))
        kept = held_out[0]
        shaped, _, _ = rewards.shape(kept.scores, kept.rollout, meta, learn=False)
        return kept.measure(state["critic"].params, shaped)

    def step_function(step: int, state: Any, meta: Meta) -> StepResult:
        timer = Timer()
        rollout = collect(
            workspace,
            policy,
            stream.take((step - 1) * section.prompts_per_step, section.prompts_per_step),
            sampling=sample,
            key=workspace.key("value", "rollout", step),
            timer=timer,
            interruptible=True,
        )
        with timer("values"):
            values = scorer(state["critic"].params, rollout.samples.pack())
        with timer("reward"):
            shaped, meta, reward_metrics = rewards.shape(rewards.scores(rollout), rollout, meta)
        experience, statistics, _ = make_experience(
            settings, rollout, shaped, rollout.samples.mask, None, None, values, 0.0
        )
        batches = mini_batches(
            rollout.samples,
            {"returns": experience.returns, "old_values": values},
            epochs=config.critic.epochs,
            mini_batch_size=section.mini_batch_size,
            aggregation=config.algorithm.value_aggregation,
            norm_length=config.rollout.max_new_tokens,
            seed=(config.seed, step),
        )
        with timer("update_critic"):
            critic_state, infos = critic.steps(state["critic"], batches, f"value step {step}")
        state = {"critic": critic_state}
        metrics = rollout.metrics() | reward_metrics | statistics
        metrics |= mean_infos(infos, "critic/")
        stop, loss = False, None
        if step % section.held_out_every == 0:
            with timer("held_out"):
                metrics |= measure(state, meta)
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
        examples = rollout.examples(config.logging.samples_per_step)
        return StepResult(state, meta, metrics, examples, best_metric=loss, stop=stop)

    loop = workspace.loop(
        "value",
        section.steps,
        best_mode="min",
        keep_steps=section.checkpoint_steps,
        before=lambda state: (measure(state, {}), []),
    )
    state, meta, done = loop.run(
        lambda: {"critic": critic.new_state(value_model.params)},
        {"critic": critic.abstract_state},
        step_function,
    )
    if done < section.steps:
        workspace.progress.message(f"value: settled after {done} steps")
    summary = {"steps": done, "origin": origin, **measure(state, meta)}
    if "reward_moments" in meta:
        summary["reward_moments"] = meta["reward_moments"]
    workspace.finish("value", summary)
