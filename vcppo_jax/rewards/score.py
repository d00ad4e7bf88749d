r"""Scores for responses: +1 for the right answer in the last box after the thinking, else -1, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from vcppo_jax.rewards import notation
from vcppo_jax.rewards.equality import MAX_ANSWER_CHARS, answers_equal
from vcppo_jax.rewards.extract import after_thinking, last_box
from vcppo_jax.rewards.pool import VerifierPool, default_pool

Reason = Literal["correct", "wrong", "no_answer", "unclosed_think", "truncated", "timeout", "error"]
REASONS: tuple[Reason, ...] = get_args(Reason)

CORRECT, INCORRECT = 1.0, -1.0
TIMEOUT_SECONDS = 2.0  # ordinary comparisons take 1 to 500 ms on one core


class Verdict(NamedTuple):
    """A sample's score, +1.0 or -1.0, and its reason, one of `REASONS`; only ``correct`` scores +1."""

    score: float
    reason: Reason


def verify(
    responses: Sequence[str],
    golds: Sequence[str | int | float],
    *,
    truncated: Sequence[bool] | None = None,
    thinking_open: Sequence[bool] | None = None,
    timeout_s: float = TIMEOUT_SECONDS,
    pool: VerifierPool | None = None,
) -> list[Verdict]:
    r"""One (score, reason) per response, in order; all sequences have the same length.

    The answer is the content of the last ``\boxed{...}`` after the last ``</think>``. Reasons, the first
    that applies: ``truncated``, ``unclosed_think``, ``no_answer`` (no box, an empty one, or one that never
    closes), then ``correct``, ``wrong``, ``timeout`` (the comparison took longer than ``timeout_s`` seconds
    of wall clock and was killed) or ``error`` (its process died).

    - ``golds``: reference answers, text or numbers; ``$...$`` and ``\boxed{...}`` around them are accepted.
    - ``truncated``: per sample, whether the length limit cut the response. Such a sample scores -1 whatever
      it holds: the field's default is a punitive reward for overlong samples. None: none was cut.
    - ``thinking_open``: per sample, whether its prompt ended with an open ``<think>``, so that a response
      without ``</think>`` never left the thinking. None: no prompt did.
    - ``pool``: who compares what exact rules cannot decide; None for the process-wide pool.

    Raises ValueError, naming the argument and the index, for a gold that is empty or neither text nor number,
    a response that is no string, or lengths that differ; RuntimeError where the pool cannot start.
    """
    _check(responses, golds, truncated, thinking_open)
    references = [_reference(gold, index) for index, gold in enumerate(golds)]
    reasons: list[Reason] = []
    open_pairs: dict[tuple[str, str], list[int]] = {}  # samples of one prompt often share an answer
    for index, response in enumerate(responses):
        cut = truncated is not None and bool(truncated[index])
        opened = thinking_open is not None and bool(thinking_open[index])
        reason, answer = ("truncated", "") if cut else _answer(response, opened)
        if reason is None:
            equal = answers_equal(answer, references[index])
            if equal is None:
                open_pairs.setdefault((answer, references[index]), []).append(index)
            else:
                reason = "correct" if equal else "wrong"
        reasons.append("error" if reason is None else reason)  # until the pool has answered
    if open_pairs:
        outcomes = (default_pool() if pool is None else pool).run(list(open_pairs), timeout_s=timeout_s)
        for indices, outcome in zip(open_pairs.values(), outcomes):
            for index in indices:
                reasons[index] = outcome
    return [Verdict(CORRECT if reason == "correct" else INCORRECT, reason) for reason in reasons]


def count_reasons(verdicts: Iterable[Verdict]) -> Counter[Reason]:
    """How many verdicts have each reason; every one of `REASONS` is a key, so metrics keep their columns."""
    counts: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
    counts.update(verdict.reason for verdict in verdicts)
    return counts


def _answer(response: str, thinking_open: bool) -> tuple[Reason | None, str]:
    """(None, content of the last box), or the reason why there is no answer."""
    text = after_thinking(response, thinking_open=thinking_open)
    if text is None:
        return "unclosed_think", ""
    box = last_box(text)
    if box is None or not box.strip(" \t\r\n{}$~"):
        return "no_answer", ""
    return None, box


def _reference(gold: object, index: int) -> str:
    r"""A gold answer as text, its ``\boxed{...}`` taken off; `notation.normalize` drops dollar signs."""
    if not isinstance(gold, str) and (gold is None or isinstance(gold, (Sequence, dict, set))):
        raise ValueError(f"golds[{index}]: expected text or a number, got {type(gold).__name__} {gold!r:.80}")
    text = str(gold)
    boxed = last_box(text)
    text = text if boxed is None else boxed
    if not notation.normalize(text[:MAX_ANSWER_CHARS]):
        raise ValueError(f"golds[{index}]: the reference answer is empty ({gold!r:.80}); drop the sample")
    return text


def _check(
    responses: Sequence[str],
    golds: Sequence[str | int | float],
    truncated: Sequence[bool] | None,
    thinking_open: Sequence[bool] | None,
) -> None:
    if isinstance(responses, str):
        raise ValueError("responses: expected a list of strings, got one string; wrap it in a list")
    if isinstance(golds, str):
        raise ValueError("golds: expected a list of answers, got one string; wrap it in a list")
    flags = {"golds": golds, "truncated": truncated, "thinking_open": thinking_open}
    for name, values in flags.items():
        if values is not None and len(values) != len(responses):
            raise ValueError(f"{name}: expected one per response, {len(responses)}, got {len(values)}")
    for index, response in enumerate(responses):
        if not isinstance(response, str):
            raise ValueError(f"responses[{index}]: expected a string, got {type(response).__name__}")
