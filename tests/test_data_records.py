"""Rows of JSONL and parquet files."""

import json
import sys

import numpy as np
import pytest

from vcppo_jax.data.records import parse_row, read_rows


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("prompt_key", ["prompt", "problem", "question"])
@pytest.mark.parametrize("answer_key", ["answer", "label", "ground_truth"])
def test_column_names(tmp_path, prompt_key, answer_key):
    file = write(tmp_path / "sums.jsonl", {prompt_key: "1+1?", answer_key: "2", "id": 7})
    (row,) = read_rows(file)
    assert (row.prompt, row.answer, row.response, row.source) == ("1+1?", "2", None, "sums")
    assert row.where == f"{file}:1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("  x ", "  x "),
        (204, "204"),
        (204.0, "204"),
        (0.5, "0.5"),
        (np.int64(3), "3"),
        (None, ""),
        (float("nan"), ""),
    ],
)
def test_answers_become_text(value, text):
    assert parse_row({"prompt": "p", "answer": value}, where="w", source="s").answer == text


def test_verl_row():
    row = parse_row(
        {
            "data_source": "gsm8k",
            "prompt": np.array([{"role": "user", "content": "hi"}], dtype=object),
            "reward_model": {"style": "rule", "ground_truth": 72},
        },
        where="w",
        source="file",
    )
    assert row.prompt == ({"role": "user", "content": "hi"},)
    assert (row.answer, row.source) == ("72", "gsm8k")


@pytest.mark.parametrize("key", ["response", "demonstration", "completion", "solution"])
def test_responses(key):
    assert parse_row({"prompt": "p", key: "r"}, where="w", source="s").response == "r"
    assert parse_row({"prompt": "p"}, where="w", source="s").answer is None


def test_blank_lines_and_byte_order_mark_are_passed_over(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\n\n  \n{"prompt": "b", "answer": 2}')
    assert [(row.prompt, row.where) for row in read_rows(file)] == [("a", f"{file}:1"), ("b", f"{file}:4")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x", "answer"', "expected one JSON object per line: Expecting ':' delimiter at column"),
        (b"[1, 2]", "expected one JSON object per line, got list"),
        (b'{"prompt": "\xff"}', "expected UTF-8 text, got byte 0xff"),
        (
            b'{"text": "x", "answer": 1}',
            "no prompt: expected one of prompt, problem, question, got text, answer",
        ),
        (b'{"prompt": 3, "answer": 1}', "prompt: expected a text or a list of messages, got int"),
        (b'{"prompt": [{"role": "user"}]}', "prompt: expected messages with the texts role and content, got"),
        (b'{"prompt": ["x"]}', "prompt: expected messages with the texts role and content, got 'x'"),
        (
            b'{"prompt": [{"role": "assistant", "content": "x"}]}',
            "prompt: expected the last message to be the user's",
        ),
        (b'{"prompt": "x", "answer": ["1"]}', "answer: expected a text or a number, got list"),
        (b'{"prompt": "x", "answer": true}', "answer: expected a text or a number, got bool"),
        (
            b'{"prompt": "x", "reward_model": {"ground_truth": []}}',
            "reward_model.ground_truth: expected a text or a number, got list",
        ),
    ],
)
def test_malformed_line_is_named(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"prompt": "fine", "answer": 1}\n' * 2 + line + b"\n")
    with pytest.raises(ValueError) as error:
        read_rows(file)
    assert str(error.value).startswith(f"{file}:3: {message}")
    assert "\n" not in str(error.value)


def test_missing_empty_and_other_files(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"none\.jsonl: expected a JSONL or parquet file; there is none"
    ):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"empty\.jsonl: expected rows .*; the file is empty"):
        read_rows(write(tmp_path / "empty.jsonl", "\n"))
    with pytest.raises(
        ValueError, match=r"a\.csv: expected a name that ends in \.jsonl or \.parquet, got \.csv"
    ):
        read_rows(write(tmp_path / "a.csv", "x"))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    from pyarrow import parquet

    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "1"}, "extra": 1.5},
        {"prompt": [{"role": "user", "content": "b"}], "reward_model": {"ground_truth": "2"}, "extra": 2.5},
    ]
    file = tmp_path / "verl.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    read = read_rows(file)
    assert [row.prompt[0]["content"] for row in read] == ["a", "b"]
    assert [row.answer for row in read] == ["1", "2"]
    assert read[1].where == f"{file}: row 2"

    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"other\.parquet: no prompt: expected one of .*, got text"):
        read_rows(tmp_path / "other.parquet")
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], "string")}), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="the file is empty"):
        read_rows(tmp_path / "none.parquet")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"damaged\.parquet: expected a parquet file"):
        read_rows(tmp_path / "damaged.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=r"a\.parquet: .* extra `parquet`: .*vcppo_jax\[parquet\]"):
        read_rows(tmp_path / "a.parquet")
