"""Rows of JSONL and parquet files, whichever of the usual column names they use.

Prompt: `prompt`, `problem` or `question`, a text or a list of messages. Answer: `answer`, `label`,
`ground_truth`, or verl's `reward_model.ground_truth`, a text or a number. Response to imitate: `response`,
`demonstration`, `completion` or `solution`. A pair to compare: `chosen` and `rejected`, each a text or
messages that end with the assistant's; where there is no prompt, the messages before it are the prompt. Name
of the data set: `source` or `data_source`, else the file's name. The first name that a row has counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PROMPT_KEYS = ("prompt", "problem", "question")
ANSWER_KEYS = ("answer", "label", "ground_truth")
RESPONSE_KEYS = ("response", "demonstration", "completion", "solution")
PAIR_KEYS = ("chosen", "rejected")
_TRUNCATED_KEY = "rejected_truncated"
SOURCE_KEYS = ("source", "data_source")
_NESTED_ANSWER_KEY = "reward_model"
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class Row:
    """One row as read, before tokenization."""

    prompt: str | tuple[dict[str, str], ...]
    """A text, or messages with `role` and `content`; may be empty."""
    answer: str | None
    """The gold answer; None where the row has no such column, empty where the column is empty."""
    response: str | None
    """The response to imitate, likewise."""
    source: str
    where: str
    """Where the row stands, for error messages: `file.jsonl:17`."""
    chosen: str | None = None
    """The better response of a pair; None where the row has no such column."""
    rejected: str | None = None
    """The worse one, likewise."""
    rejected_truncated: bool = False
    """Whether a length limit cut the worse one: then no EOS is put behind it."""


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a JSONL or parquet file, in order; blank lines are passed over.

    Raises FileNotFoundError for a missing file; ValueError for another kind of file, a file without rows, and
    a malformed row, named as `file.jsonl:17` or `file.parquet: row 17` (both count from 1); ImportError where
    a parquet file is given and the extra `parquet` is not installed.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: expected a JSONL or parquet file; there is none")
    if file.suffix in _JSONL_SUFFIXES:
        items = _read_jsonl(file)
    elif file.suffix == ".parquet":
        items = _read_parquet(file)
    else:
        raise ValueError(
            f"{path}: expected a name that ends in .jsonl or .parquet, got {file.suffix or 'neither'}"
        )
    rows = [parse_row(item, where=where, source=file.stem) for where, item in items]
    if len(rows) == 0:
        raise ValueError(f"{path}: expected rows with a prompt and an answer; the file is empty")
    return rows


def parse_row(item: Mapping[str, Any], *, where: str, source: str) -> Row:
    """One row from a mapping of columns; `source` is its data set's name unless a column says another.

    Raises ValueError, beginning with `where`, for a missing prompt column or a value of the wrong kind.
    """
    key = _first_key(item, PROMPT_KEYS)
    implicit = _prompt_of_pair(item, where) if key is None else None
    if key is None and implicit is None:
        raise ValueError(f"{where}: no prompt: expected one of {', '.join(PROMPT_KEYS)}, got {_names(item)}")
    response_key = _first_key(item, RESPONSE_KEYS)
    source_key = _first_key(item, SOURCE_KEYS)
    named = None if source_key is None else item[source_key]
    return Row(
        prompt=_prompt(item[key], f"{where}: {key}") if key is not None else implicit or (),
        answer=_answer(item, where),
        response=None if response_key is None else _text(item[response_key], f"{where}: {response_key}"),
        source=source if named is None else _text(named, f"{where}: {source_key}"),
        where=where,
        rejected_truncated=_flag(item, where),
        **{side: _completion(item[side], f"{where}: {side}") for side in PAIR_KEYS if side in item},
    )


def _read_jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                item = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{where}: expected UTF-8 text, got byte {line[error.start]:#04x}"
                ) from error
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}: expected one JSON object per line: {error.msg} at column {error.colno}"
                ) from error
            if not text:
                continue
            if not isinstance(item, dict):
                raise ValueError(f"{where}: expected one JSON object per line, got {type(item).__name__}")
            yield where, item


def _read_parquet(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            f"{file}: parquet files need the extra `parquet`: python3 -m pip install 'vcppo_jax[parquet]'"
        ) from error
    known = {
        *(*PROMPT_KEYS, *ANSWER_KEYS, *RESPONSE_KEYS, *PAIR_KEYS, *SOURCE_KEYS),
        *(_NESTED_ANSWER_KEY, _TRUNCATED_KEY),
    }
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            columns = [name for name in names if name in known]
            if not any(name in (*PROMPT_KEYS, *PAIR_KEYS) for name in columns):
                raise ValueError(
                    f"{file}: no prompt: expected one of {', '.join(PROMPT_KEYS)}, got {', '.join(names)}"
                )
            number = 0
            for batch in table.iter_batches(columns=columns):
                for item in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", item
    except (pyarrow.ArrowException, OSError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"{file}: expected a parquet file: {first_line}") from error


def _flag(item: Mapping[str, Any], where: str) -> bool:
    value = item.get(_TRUNCATED_KEY)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: {_TRUNCATED_KEY}: expected true or false, got {value!r}")
    return bool(value)


def _first_key(item: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if key in item), None)


def _names(item: Mapping[str, Any]) -> str:
    return ", ".join(map(str, item)) or "no columns"


def _prompt(value: Any, where: str) -> str | tuple[dict[str, str], ...]:
    """A text or messages; None is an empty text."""
    if value is None or isinstance(value, str):
        return value or ""
    messages = _messages(value, where)
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{where}: expected the last message to be the user's, got the assistant's; "
            "put a response to imitate in a column `response`"
        )
    return messages


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    """A list of messages, with what else they hold left out."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: expected a text or a list of messages, got {type(value).__name__}")
    for message in value:
        fields = message if isinstance(message, Mapping) else {}
        if not (isinstance(fields.get("role"), str) and isinstance(fields.get("content"), str)):
            raise ValueError(
                f"{where}: expected messages with the texts role and content, got {message!r}"[:300]
            )
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _conversation(value: Any, where: str) -> tuple[dict[str, str], ...] | None:
    """The messages of one side of a pair, of which the last is the assistant's; None where it is a text."""
    if not isinstance(value, np.ndarray | list | tuple):
        return None
    messages = _messages(value, where)
    if not messages or messages[-1]["role"] != "assistant":
        last = f"the {messages[-1]['role']}'s" if messages else "no message"
        raise ValueError(f"{where}: expected the last message to be the assistant's, got {last}")
    return messages


def _completion(value: Any, where: str) -> str:
    """A response of a pair: the text, or the last message of the conversation."""
    messages = _conversation(value, where)
    return _text(value, where) if messages is None else messages[-1]["content"]


def _prompt_of_pair(item: Mapping[str, Any], where: str) -> tuple[dict[str, str], ...] | None:
    """The messages that both sides of a pair begin with; None where there are none."""
    sides = [_conversation(item.get(side), f"{where}: {side}") for side in PAIR_KEYS]
    chosen, rejected = (() if side is None else side[:-1] for side in sides)
    if not chosen or not rejected:
        return None
    if chosen != rejected:
        raise ValueError(
            f"{where}: expected chosen and rejected to answer the same messages; they differ before the last"
        )
    _prompt(chosen, f"{where}: chosen")
    return chosen


def _answer(item: Mapping[str, Any], where: str) -> str | None:
    """The gold answer as text; None where no column has that name."""
    key = _first_key(item, ANSWER_KEYS)
    if key is not None:
        return _text(item[key], f"{where}: {key}")
    nested = item.get(_NESTED_ANSWER_KEY)
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return _text(nested["ground_truth"], f"{where}: {_NESTED_ANSWER_KEY}.ground_truth")
    return None


def _text(value: Any, where: str) -> str:
    """A text, or a number as text (2.0 as 2); None and NaN, a table's missing value, are empty."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{where}: expected a text or a number, got {type(value).__name__}")
