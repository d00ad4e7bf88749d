"""Prompts with gold answers, demonstrations, preference pairs: from rows to token ids, and a shuffled stream.

Rows come from a file (`records.read_rows`) or a task (`task_rows`). What cannot be used is dropped at load
and counted in a `LoadReport`, so that nothing is dropped silently during training. `RecordStream` then
makes the data position one whole number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import grain

from vcppo_jax.data.records import Row
from vcppo_jax.data.tasks import Problem
from vcppo_jax.data.tokenizer import encode_rendered, encode_response, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt ready to be sampled from, and what its responses are scored against."""

    prompt_ids: tuple[int, ...]
    """Token ids, chat template applied."""
    prompt_text: str
    """The problem as the user wrote it (the last message), for reports."""
    answer: str
    """The gold answer."""
    source: str
    """The data set's name; validation metrics are kept apart by it."""
    thinking_open: bool
    """Whether the rendered prompt ends inside an open `<think>`, so that responses begin by thinking."""
    prompt: str | tuple[dict[str, str], ...] = ""
    """The prompt as it was read: a text, or messages."""


@dataclass(frozen=True, slots=True)
class SFTExample:
    """A demonstration to imitate; the loss falls on `response_ids` alone."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """Closed by EOS."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two responses to one prompt, of which the first is the better; both closed by EOS."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


@dataclass(frozen=True)
class LoadReport:
    """What became of the rows of one source. `str()` is the line to log."""

    source: str
    kind: str
    """`prompts`, `demonstrations` or `pairs`."""
    read: int
    kept: int
    empty: int
    """Dropped: no text in the prompt (or, for demonstrations and pairs, in a response)."""
    no_answer: int
    """Dropped: an empty gold answer."""
    over_long: int
    """Dropped: more tokens than allowed."""
    alike: int = 0
    """Dropped: pairs whose two responses are the same."""

    def __str__(self) -> str:
        reasons = {
            "empty": self.empty,
            "without an answer": self.no_answer,
            "of two responses that are the same": self.alike,
            "too long": self.over_long,
        }
        dropped = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count > 0)
        return f"{self.source}: {self.kept} of {self.read} {self.kind} kept (dropped: {dropped or 'none'})"


def prompt_records(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    max_prompt_tokens: int,
    system_prompt: str | None = None,
) -> tuple[list[PromptRecord], LoadReport]:
    """The usable prompts in order, and the report. `name` is the source's name in the report and in errors.

    Raises ValueError where a row has no answer at all (naming it) and where no prompt is left.
    """
    for row in rows:
        if row.answer is None:
            raise ValueError(
                f"{row.where}: no gold answer: expected one of answer, label, ground_truth or "
                "reward_model.ground_truth"
            )
    written = [row for row in rows if _question(row).strip()]
    answered = [row for row in written if str(row.answer).strip()]
    texts = _render(answered, tokenizer, system_prompt)
    records = [
        PromptRecord(
            prompt_ids=tuple(ids),
            prompt_text=_question(row),
            answer=str(row.answer),
            source=row.source,
            thinking_open=_thinking_open(text),
            prompt=row.prompt,
        )
        for row, text, ids in zip(answered, texts, encode_rendered(tokenizer, texts), strict=True)
        if len(ids) <= max_prompt_tokens
    ]
    report = LoadReport(
        source=name,
        kind="prompts",
        read=len(rows),
        kept=len(records),
        empty=len(rows) - len(written),
        no_answer=len(written) - len(answered),
        over_long=len(answered) - len(records),
    )
    _require_some(report, f"prompts of at most {max_prompt_tokens} tokens with an answer")
    return records, report


def sft_examples(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
    system_prompt: str | None = None,
) -> tuple[list[SFTExample], LoadReport]:
    """The usable demonstrations in order, and the report.

    Where the rendered prompt already opens `<think>`, the response's own `<think>` is left out.
    Raises ValueError where a row has no response at all (naming it) and where no demonstration is left.
    """
    for row in rows:
        if row.response is None:
            raise ValueError(
                f"{row.where}: no response to imitate: expected one of response, demonstration, completion, "
                "solution"
            )
    written = [row for row in rows if _question(row).strip() and str(row.response).strip()]
    texts = _render(written, tokenizer, system_prompt)
    examples = []
    for row, text, prompt_ids in zip(written, texts, encode_rendered(tokenizer, texts), strict=True):
        response_ids = encode_response(tokenizer, _continuing(text, str(row.response)))
        if len(prompt_ids) <= max_prompt_tokens and len(response_ids) <= max_response_tokens:
            examples.append(SFTExample(prompt_ids=tuple(prompt_ids), response_ids=tuple(response_ids)))
    report = LoadReport(
        source=name,
        kind="demonstrations",
        read=len(rows),
        kept=len(examples),
        empty=len(rows) - len(written),
        no_answer=0,
        over_long=len(written) - len(examples),
    )
    _require_some(
        report,
        f"demonstrations of at most {max_prompt_tokens} prompt and {max_response_tokens} response tokens",
    )
    return examples, report


def preference_pairs(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    max_prompt_tokens: int,
    max_response_tokens: int,
    system_prompt: str | None = None,
) -> tuple[list[PreferencePair], LoadReport]:
    """The usable pairs in order, and the report; responses are encoded as in `sft_examples`, but for one that
    a length limit cut, which is not closed by EOS.

    Raises ValueError where a row lacks a response (naming it) and where no pair is left.
    """
    for row in rows:
        if row.chosen is None or row.rejected is None:
            missing = "chosen" if row.chosen is None else "rejected"
            raise ValueError(
                f"{row.where}: no {missing} response: expected the columns chosen and rejected, each a text "
                "or messages that end with the assistant's"
            )
    written = [row for row in rows if _question(row).strip() and row.chosen.strip() and row.rejected.strip()]  # type: ignore[union-attr]
    different = [row for row in written if row.chosen != row.rejected]
    texts = _render(different, tokenizer, system_prompt)
    pairs = []
    for row, text, prompt_ids in zip(different, texts, encode_rendered(tokenizer, texts), strict=True):
        chosen, rejected = (
            encode_response(tokenizer, _continuing(text, str(side))) for side in (row.chosen, row.rejected)
        )
        if row.rejected_truncated:
            rejected = rejected[:-1]
        if len(prompt_ids) <= max_prompt_tokens and max(len(chosen), len(rejected)) <= max_response_tokens:
            pairs.append(PreferencePair(tuple(prompt_ids), tuple(chosen), tuple(rejected)))
    report = LoadReport(
        source=name,
        kind="pairs",
        read=len(rows),
        kept=len(pairs),
        empty=len(rows) - len(written),
        no_answer=0,
        over_long=len(different) - len(pairs),
        alike=len(written) - len(different),
    )
    _require_some(
        report, f"pairs of at most {max_prompt_tokens} prompt and {max_response_tokens} response tokens"
    )
    return pairs, report


def task_rows(
    problems: Sequence[Problem],
    *,
    source: str,
    responses: Sequence[str] | None = None,
    pairs: Sequence[tuple[str, str, bool]] | None = None,
) -> list[Row]:
    """Rows of a task's problems, in the same order, with the responses to imitate or the pairs, if any:
    chosen, rejected, and whether that one was cut.
    """
    texts: Sequence[str | None] = [None] * len(problems) if responses is None else responses
    sides: Sequence[tuple[str | None, str | None, bool]] = (
        [(None, None, False)] * len(problems) if pairs is None else pairs
    )
    return [
        Row(
            prompt=p.prompt,
            answer=p.answer,
            response=text,
            source=source,
            where=f"{source}: problem {index}",
            chosen=chosen,
            rejected=rejected,
            rejected_truncated=truncated,
        )
        for index, (p, text, (chosen, rejected, truncated)) in enumerate(
            zip(problems, texts, sides, strict=True)
        )
    ]


class RecordStream(Generic[T]):
    """An endless shuffled stream of records, read by position: the position is all that a resume needs.

    Each epoch has each record once, in an order of its own that depends on the seed alone (Grain's
    index shuffle: no permutation is held in memory). Raises ValueError for no records or a seed below 0.
    """

    def __init__(self, records: Sequence[T], *, seed: int) -> None:
        if len(records) == 0:
            raise ValueError("records: expected at least one, got none")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed: expected a whole number from 0 to 2**32 - 1, got {seed}")
        self._records = records
        self._order = grain.MapDataset.range(len(records)).seed(seed).shuffle().repeat()

    def __len__(self) -> int:
        """Records in one epoch."""
        return len(self._records)

    def take(self, position: int, count: int) -> list[T]:
        """The `count` records from `position` on; the next call takes from `position + count`."""
        if position < 0 or count < 0:
            raise ValueError(f"position, count: expected none below 0, got {position}, {count}")
        return [self._records[int(self._order[index])] for index in range(position, position + count)]


def _question(row: Row) -> str:
    """The text that the user wrote: the prompt, or the last message."""
    return row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"] if row.prompt else ""


def _render(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> list[str]:
    """The rows' prompts as text; an error of the template names the row."""
    texts = []
    for row in rows:
        try:
            texts.append(render_chat(tokenizer, row.prompt, system_prompt=system_prompt))
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from error
    return texts


def _thinking_open(rendered: str) -> bool:
    return rendered.rstrip().endswith("<think>")


def _continuing(rendered: str, response: str) -> str:
    """The response without its own `<think>` where the rendered prompt has opened one already."""
    if _thinking_open(rendered) and response.lstrip().startswith("<think>"):
        response = response.lstrip().removeprefix("<think>")
        return response.lstrip("\n") if rendered.endswith("\n") else response
    return response


def _require_some(report: LoadReport, expected: str) -> None:
    if report.kept == 0:
        raise ValueError(f"{report}; expected {expected}")
