"""Samples responses and scores them: the rollout that value-pretraining, RL and evaluation share."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from vcppo_jax.config import Config
from vcppo_jax.data.prompts import PromptRecord
from vcppo_jax.data.tokenizer import decode, stop_finder
from vcppo_jax.models.networks import Policy
from vcppo_jax.phases.loop import Metrics, Timer
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.rewards.score import Verdict, count_reasons, verify
from vcppo_jax.rollout.engine import generate
from vcppo_jax.rollout.plan import Progress
from vcppo_jax.rollout.sampling import Sampling
from vcppo_jax.run.processes import Shares
from vcppo_jax.train.minibatches import Samples, widen
from vcppo_jax.types import Rollout


@dataclasses.dataclass
class ScoredRollout:
    """Responses with their verdicts; B rows, the n samples of a prompt adjacent."""

    records: list[PromptRecord]
    """[B], the record of each row."""
    samples: Samples
    engine_logprobs: np.ndarray
    """[B, T] float32, of the sampled tokens, as the engine computed them."""
    truncated: np.ndarray
    decode: Callable[[np.ndarray], str]
    """From the tokens of a response to its text."""
    judge: Callable[[], list[Verdict]]
    """Waits for the verifier, which works in the background; all processes must call it together."""
    tokens: int
    """Response tokens that were sampled for these rows and those they were chosen from,"""
    row_steps: int
    """and the decode steps times slots that it took."""

    @property
    def verdicts(self) -> list[Verdict]:
        """[B]; raises what the verifier raised."""
        return self.judge()

    @property
    def scores(self) -> np.ndarray:
        """[B] float32, +1 or -1."""
        return np.asarray([verdict.score for verdict in self.verdicts], np.float32)

    def text(self, row: int) -> str:
        """The response of this row."""
        return self.decode(self.samples.responses[row, : self.samples.lengths[row]])

    def take(self, rows: np.ndarray) -> ScoredRollout:
        """These rows, in their order."""
        return ScoredRollout(
            [self.records[i] for i in rows.tolist()],
            self.samples.take(rows),
            self.engine_logprobs[rows],
            self.truncated[rows],
            self.decode,
            _already([self.verdicts[i] for i in rows.tolist()]),
            self.tokens,
            self.row_steps,
        )

    def join(self, other: ScoredRollout) -> ScoredRollout:
        """These rows, then the other's."""
        samples = self.samples.join(other.samples)
        width = samples.responses.shape[1]
        return ScoredRollout(
            [*self.records, *other.records],
            samples,
            np.concatenate([widen(self.engine_logprobs, width), widen(other.engine_logprobs, width)]),
            np.concatenate([self.truncated, other.truncated]),
            self.decode,
            _already([*self.verdicts, *other.verdicts]),
            self.tokens + other.tokens,
            self.row_steps + other.row_steps,
        )

    def metrics(self) -> Metrics:
        """Scores, accuracy, lengths and the share of each verdict, by verl's names."""
        scores, lengths = self.scores, self.samples.lengths
        row: Metrics = {
            "critic/score/mean": float(scores.mean()),
            "critic/score/max": float(scores.max()),
            "critic/score/min": float(scores.min()),
            "critic/acc/mean": float((scores > 0).mean()),
            "response_length/mean": float(lengths.mean()),
            "response_length/max": int(lengths.max()),
            "response_length/min": int(lengths.min()),
            "response_length/clip_ratio": float(self.truncated.mean()),
            "rollout/slot_utilisation": self.tokens / self.row_steps,
        }
        counts = count_reasons(self.verdicts)
        return row | {f"verifier/{reason}": count / len(scores) for reason, count in counts.items()}

    def examples(self, count: int) -> list[dict[str, Any]]:
        """The first responses of `count` different prompts, as lines of samples.jsonl."""
        stride = max(1, len(self.records) // max(1, count))
        return [
            {
                "prompt": self.records[i].prompt_text,
                "response": self.text(i),
                "gold": self.records[i].answer,
                "score": self.verdicts[i].score,
                "reason": self.verdicts[i].reason,
                "length": int(self.samples.lengths[i]),
                "truncated": bool(self.truncated[i]),
            }
            for i in range(0, len(self.records), stride)[:count]
        ]


def rollout_sampling(config: Config) -> Sampling:
    """How value-pretraining and RL sample."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        n=rollout.n,
    )


def collect(
    workspace: Workspace,
    policy: Policy,
    records: Sequence[PromptRecord],
    *,
    sampling: Sampling,
    key: jax.Array,
    timer: Timer,
    interruptible: bool,
    int8_weights: bool = False,
) -> ScoredRollout:
    """`sampling.n` responses to each record; the verifier reads each in the background once it has ended.

    With `interruptible`, a signal ends it between decode chunks (raises Interrupted); the caller then still
    holds the state from before the step.
    """
    total, started_at = len(records) * sampling.n, time.monotonic()
    now = Progress(0, 0, 0)
    stop = workspace.config.rollout.stop

    def on_progress(progress: Progress) -> None:
        nonlocal now
        now = progress
        if interruptible:
            workspace.signals.check()
        rate = now.tokens / (time.monotonic() - started_at)
        workspace.progress.substep(f"generate, {now.tokens} tokens, {rate:.0f}/s", now.finished, total)

    rows = [record for record in records for _ in range(sampling.n)]
    as_text = functools.partial(decode, workspace.tokenizer, eos_ids=workspace.eos_ids)
    on_finished, verdicts = _verify_as_they_end(workspace, rows, as_text, together=sampling.n)

    with timer("generate"):
        rollout = generate(
            policy,
            [record.prompt_ids for record in records],
            sampling=sampling,
            key=key,
            eos_ids=workspace.eos_ids,
            pad_id=workspace.pad_id,
            batch_size=workspace.config.rollout.batch_size,
            mesh=workspace.rollout_mesh,
            int8_weights=int8_weights,
            find_stop=stop_finder(workspace.tokenizer, stop) if stop else None,
            token_budget=workspace.config.rollout.token_budget,
            on_progress=on_progress,
            on_finished=on_finished,
        )
    samples = Samples(
        [record.prompt_ids for record in rows],
        np.asarray(rollout.tokens),
        np.asarray(rollout.lengths),
        lambda count: workspace.shape_for(sampling.max_new_tokens, count),
    )
    return ScoredRollout(
        rows,
        samples,
        np.asarray(rollout.logprobs),
        np.asarray(rollout.truncated),
        as_text,
        lambda: verdicts.results,
        now.tokens,
        now.row_steps,
    )


def _verify_as_they_end(
    workspace: Workspace, rows: list[PromptRecord], as_text: Callable[[np.ndarray], str], *, together: int
) -> tuple[Callable[[np.ndarray, Rollout], None], Shares[Verdict]]:
    """(what `generate` gives the responses to `rows` to, their verdicts); `together` rows are of a prompt."""
    ended: dict[int, tuple[np.ndarray, bool]] = {}
    """Row to its response's tokens and whether it was truncated."""

    def verified(items: list[int]) -> list[Verdict]:
        responses, truncated = zip(*[ended.pop(i) for i in items])
        return verify(
            [as_text(tokens) for tokens in responses],
            [rows[i].answer for i in items],
            truncated=truncated,
            thinking_open=[rows[i].thinking_open for i in items],
            timeout_s=workspace.config.verifier.timeout_s,
            pool=workspace.verifier,
        )

    verdicts = Shares(len(rows), verified, together=together)

    def on_finished(finished: np.ndarray, rollout: Rollout) -> None:
        items = finished.tolist()
        tokens, lengths, truncated = map(np.asarray, (rollout.tokens, rollout.lengths, rollout.truncated))
        ended.update({row: (tokens[i, : lengths[i]], bool(truncated[i])) for i, row in enumerate(items)})
        verdicts.give(items)

    return on_finished, verdicts


def _already(verdicts: list[Verdict]) -> Callable[[], list[Verdict]]:
    return lambda: verdicts


@dataclasses.dataclass
class VariedRollout:
    """What `collect_varied` gives."""

    rollout: ScoredRollout
    position: int
    """Where the next step's prompts begin."""
    metrics: Metrics


def collect_varied(
    sample: Callable[[int, int], ScoredRollout],
    *,
    position: int,
    prompts: int,
    group_size: int,
    rounds: int,
) -> VariedRollout:
    """Dynamic sampling (DAPO, arXiv 2503.14476): `prompts` groups neither all right nor all wrong.

    `sample(round, position)` gives `prompts` groups for the prompts from `position` on; rounds follow until
    there are enough or `rounds` are done. What then lacks is filled up with the first of the other groups, so
    that a step has one size. Groups beyond `prompts` are not used and not sampled again in this epoch.
    """
    pieces: list[ScoredRollout] = []
    varied: list[int] = []
    equal: list[int] = []
    while len(varied) < prompts and len(pieces) < rounds:
        rollout = sample(len(pieces), position)
        position += prompts
        groups = rollout.scores.reshape(-1, group_size)
        varies = groups.max(axis=1) > groups.min(axis=1)
        first = len(pieces) * prompts
        varied += (first + np.flatnonzero(varies)).tolist()
        equal += (first + np.flatnonzero(~varies)).tolist()
        pieces.append(rollout)
    whole = functools.reduce(ScoredRollout.join, pieces)
    filled = max(0, prompts - len(varied))
    chosen = np.asarray([*varied[:prompts], *equal[:filled]])
    rows = (chosen[:, None] * group_size + np.arange(group_size)).reshape(-1)
    metrics: Metrics = {
        "dynamic_sampling/rounds": len(pieces),
        "dynamic_sampling/varied_share": len(varied) / (len(varied) + len(equal)),
        "dynamic_sampling/filled": filled,
        "dynamic_sampling/acc/mean": float((whole.scores > 0).mean()),
    }
    return VariedRollout(whole.take(rows), position, metrics)
