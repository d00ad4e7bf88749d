"""Reward model: a value network trained on pairs of responses (Bradley-Terry), and its scores of responses.

The score of a response is the value of the state after its last token, EOS included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vcppo_jax.algos.shaping import bradley_terry_loss
from vcppo_jax.config_load import ConfigError
from vcppo_jax.data.packing import Packing, PackShape
from vcppo_jax.data.prompts import PreferencePair, RecordStream
from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.specs import weight_specs
from vcppo_jax.phases.artifacts import (
    check_tokenizer,
    find_model,
    save_model_files,
    value_model_and_origin,
    value_model_from_policy,
)
from vcppo_jax.phases.loop import Meta, Metrics, StepResult, Timer, mean_infos
from vcppo_jax.phases.networks import learner
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.train.learner import Scorer
from vcppo_jax.train.minibatches import Samples
from vcppo_jax.train.objectives import ScoreObjective, ValueScore
from vcppo_jax.train.updates import Params

_SPLIT_STREAM = 4
"""Second word of the random seed that chooses the held-out pairs."""


class ResponseEnds:
    """B responses packed so that a value network's score of each can be read, and trained on.

    A packed row keeps per-token numbers where the token is predicted, so the state after the last token has
    no place in it. Each response therefore gets one token more, at whose place that state is read; attention
    is causal, so nothing sees which token it is. `shape` must leave room for it.
    """

    def __init__(self, samples: Samples, shape: PackShape) -> None:
        self.packing = Packing(
            samples.prompts, np.pad(samples.responses, ((0, 0), (0, 1))), samples.lengths + 1, shape
        )
        self._size = (len(samples), samples.responses.shape[1] + 1)
        self._ends = (np.arange(len(samples)), samples.lengths)

    def read(self, values: np.ndarray) -> np.ndarray:
        """[B], the score of each response in values [B, T + 1] that were gathered from the packing."""
        return values[self._ends]

    def field(self, numbers: np.ndarray) -> np.ndarray:
        """[B, T + 1] float32 field of the packing with one number per response [B] at its end, else 0."""
        field = np.zeros(self._size, np.float32)
        field[self._ends] = numbers
        return field


class ResponseScorer:
    """Scores whole responses with a value network; one compilation serves all calls of one size."""

    def __init__(self, workspace: Workspace, model: ModelConfig) -> None:
        self._workspace = workspace
        self._scorer = Scorer(ValueScore(model), workspace.mesh)

    def ends(self, samples: Samples, capacity: int) -> ResponseEnds:
        """The samples packed, in the shape for `capacity` of them."""
        return ResponseEnds(samples, self._workspace.shape_for(samples.responses.shape[1] + 1, capacity))

    def __call__(self, params: Params, ends: ResponseEnds) -> np.ndarray:
        """[B] float32, the score of each response."""
        return ends.read(self._scorer(params, ends.packing))


class RewardScorer:
    """A trained reward model that scores rollouts.

    `path` is a reward model's Hugging Face directory, or the reward phase of a run (runs/x/reward). Raises
    ConfigError where its head was never trained or its tokenizer gives a token another id than the policy's;
    else as `load_value_model`.
    """

    def __init__(self, workspace: Workspace, path: str | Path) -> None:
        source = find_model(path, "critic")
        check_tokenizer(path, source.model_dir, workspace.tokenizer)
        model = workspace.config.model
        value_model, _ = value_model_and_origin(
            path,
            compute_dtype=model.compute_dtype,
            remat=model.remat,
            attention=model.attention,
            mesh=workspace.mesh,
            layout=workspace.config.mesh.layout.reference,
            head_bias=False,
        )
        # A new head is zero, and gives every response the same score.
        if not bool(jnp.any(value_model.params["score"]["kernel"])):
            raise ConfigError(
                f"{path}: expected a reward model, got a model whose scalar head is new (head new); give the "
                "reward phase of a run (runs/x/reward), or a directory that holds a trained head"
            )
        self._params = value_model.params
        self._scorer = ResponseScorer(workspace, value_model.config)
        self.score_mean: float | None = None
        """Mean of the held-out scores at the end of the model's training; None unless `path` is a phase."""
        self.score_std: float | None = None
        """Their standard deviation."""
        if source.checkpoint is not None and source.checkpoint.name == "checkpoints":
            summary = source.checkpoint.parent / "summary.json"
            facts = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
            self.score_mean, self.score_std = facts.get("score_mean"), facts.get("score_std")

    def __call__(self, samples: Samples) -> np.ndarray:
        """[B] float32, the score of each response."""
        return self._scorer(self._params, self._scorer.ends(samples, len(samples)))


def split_pairs(
    pairs: Sequence[PreferencePair], *, share: float, seed: int
) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """(pairs to train on, held-out pairs): about `share` of the prompts, at least one, with all their pairs.

    Raises ValueError where there are not two prompts.
    """
    prompts = list(dict.fromkeys(pair.prompt_ids for pair in pairs))
    if len(prompts) < 2:
        raise ValueError(
            "reward_model.data: expected pairs of two prompts at least, one of them to hold out; "
            f"got {len(prompts)}"
        )
    count = min(max(1, round(share * len(prompts))), len(prompts) - 1)
    order = np.random.default_rng([seed, _SPLIT_STREAM]).permutation(len(prompts))
    held_out = {prompts[index] for index in order[:count]}
    return (
        [pair for pair in pairs if pair.prompt_ids not in held_out],
        [pair for pair in pairs if pair.prompt_ids in held_out],
    )


def pair_samples(workspace: Workspace, pairs: Sequence[PreferencePair]) -> Samples:
    """The chosen responses of N pairs, then the rejected ones: [2N, rollout.max_new_tokens]."""
    responses = [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
    max_tokens = workspace.config.rollout.max_new_tokens
    tokens = np.zeros((len(responses), max_tokens), np.int32)
    for row, response in zip(tokens, responses):
        row[: len(response)] = response
    return Samples(
        [pair.prompt_ids for pair in pairs] * 2,
        tokens,
        np.asarray([len(response) for response in responses]),
        lambda count: workspace.shape_for(max_tokens, count),
    )


def pair_loss(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Bradley-Terry loss, accuracy) of scores [2N], those of the chosen responses first."""
    chosen, rejected = jnp.split(scores, 2)
    return bradley_terry_loss(chosen, rejected)


_pair_loss = jax.jit(jax.value_and_grad(pair_loss, has_aux=True))


def pair_metrics(scores: np.ndarray, prefix: str) -> tuple[Metrics, np.ndarray]:
    """(loss, accuracy and margin under `prefix`, d loss / d score [2N]) of scores [2N] as in `pair_loss`."""
    (loss, accuracy), gradient = jax.device_get(_pair_loss(scores))
    chosen, rejected = np.split(scores, 2)
    numbers = {"loss": loss, "acc": accuracy, "margin": (chosen - rejected).mean()}
    return {f"{prefix}{name}": float(number) for name, number in numbers.items()}, gradient


def pair_scores(
    workspace: Workspace, scorer: ResponseScorer, params: Params, pairs: Sequence[PreferencePair]
) -> np.ndarray:
    """[2N] scores of N pairs, the chosen responses first, in batches of the size of an update's."""
    size = workspace.config.reward_model.batch_size
    parts = []
    for start in range(0, len(pairs), size):
        samples = pair_samples(workspace, pairs[start : start + size])
        parts.append(scorer(params, scorer.ends(samples, 2 * size)).reshape(2, -1))
    return np.concatenate(parts, axis=1).reshape(-1)


def run(workspace: Workspace) -> None:
    """Train a reward model from the starting policy's weights on pairs, most of which it may see."""
    config, section = workspace.config, workspace.config.reward_model
    phase_dir = workspace.begin("reward")
    pairs, held_out = split_pairs(workspace.pairs(), share=section.held_out_share, seed=config.seed)
    workspace.progress.message(f"reward: {len(pairs)} pairs to train on, {len(held_out)} held out")
    # No bias: it would cancel in every difference of two scores.
    layout = config.mesh.layout.critic
    model, origin = value_model_from_policy(
        workspace.starting_policy(), workspace.mesh, layout=layout, head_bias=False
    )
    stream = RecordStream(pairs, seed=config.seed)
    steps = section.steps
    if steps is None:
        steps = section.epochs * math.ceil(len(stream) / section.batch_size)
    critic = learner(
        config,
        workspace.mesh,
        "reward model",
        weight_specs(model.config, head="value", head_bias=False),
        ScoreObjective(model.config),
        section,
        updates=steps,
        say=workspace.progress.message,
        layout=layout,
    )
    scorer = ResponseScorer(workspace, model.config)
    save_model_files(phase_dir, "critic", workspace.model_dir, {"head_bias": False})

    def measure(state: Any) -> tuple[np.ndarray, Metrics]:
        scores = pair_scores(workspace, scorer, state["critic"].params, held_out)
        return scores, pair_metrics(scores, "held_out/")[0]

    def step_function(step: int, state: Any, meta: Meta) -> StepResult:
        timer = Timer()
        batch = stream.take((step - 1) * section.batch_size, section.batch_size)
        with timer("score"):
            ends = scorer.ends(pair_samples(workspace, batch), 2 * section.batch_size)
            metrics, gradient = pair_metrics(scorer(state["critic"].params, ends), "reward/")
        with timer("update"):
            fields = {"score_gradients": ends.field(gradient)}
            new, info = critic.step(state["critic"], ends.packing, fields, f"reward step {step}")
        state = {"critic": new}
        metrics |= mean_infos([info], "reward/")
        if step == steps:
            with timer("held_out"):
                metrics |= measure(state)[1]
        return StepResult(state, meta, metrics | timer.metrics(), best_metric=-metrics["reward/loss"])

    state, _, done = workspace.loop("reward", steps, before=lambda state: (measure(state)[1], [])).run(
        lambda: {"critic": critic.new_state(model.params)}, {"critic": critic.abstract_state}, step_function
    )
    scores, metrics = measure(state)
    spread = {"score_mean": float(scores.mean()), "score_std": float(scores.std())}
    workspace.finish("reward", {"steps": done, "origin": origin, **metrics, **spread})
