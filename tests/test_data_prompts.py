"""From rows to token ids, what is dropped, and the shuffled stream."""

import pytest

from vcppo_jax.data.prompts import (
    PromptRecord,
    RecordStream,
    SFTExample,
    prompt_records,
    sft_examples,
    task_rows,
)
from vcppo_jax.data.records import Row
from vcppo_jax.data.tasks import SumTask, demonstrations, problems
from vcppo_jax.data.tokenizer import builtin_model_dir, encode_chat, encode_response, load_tokenizer

THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n<think>\n' }}"
)


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer(builtin_model_dir("tiny"))


@pytest.fixture(scope="module")
def thinker():
    tokenizer = load_tokenizer(builtin_model_dir("tiny"))
    tokenizer.chat_template = THINKING_TEMPLATE
    return tokenizer


def row(prompt="p", answer="1", response=None, line=1):
    return Row(prompt=prompt, answer=answer, response=response, source="s", where=f"f.jsonl:{line}")


def test_records(tiny):
    messages = ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"})
    records, report = prompt_records(
        [row("P", "7"), row(messages, "8")], tiny, name="f", max_prompt_tokens=99
    )
    assert records == [
        PromptRecord(tuple(encode_chat(tiny, "P")), "P", "7", "s", False, "P"),
        PromptRecord(tuple(encode_chat(tiny, messages)), "Q", "8", "s", False, messages),
    ]
    assert str(report) == "f: 2 of 2 prompts kept (dropped: none)"
    (record,), _ = prompt_records([row("P")], tiny, name="f", max_prompt_tokens=99, system_prompt="S")
    assert record.prompt_ids == tuple(encode_chat(tiny, "P", system_prompt="S"))


def test_dropped_prompts_are_counted(tiny):
    fits = len(encode_chat(tiny, "x" * 10))
    rows = [row(" \n"), row(""), row(()), row("x" * 10), row("x" * 11), row("x", " ")]
    records, report = prompt_records(rows, tiny, name="f", max_prompt_tokens=fits)
    assert [record.prompt_text for record in records] == ["x" * 10]
    assert str(report) == "f: 1 of 6 prompts kept (dropped: 3 empty, 1 without an answer, 1 too long)"
    assert (report.read, report.kept, report.empty, report.no_answer, report.over_long) == (6, 1, 3, 1, 1)


def test_no_usable_prompt(tiny):
    with pytest.raises(
        ValueError, match=r"f: 0 of 1 prompts kept \(dropped: 1 too long\); expected prompts of"
    ):
        prompt_records([row("x" * 50)], tiny, name="f", max_prompt_tokens=20)


def test_a_missing_answer_or_response_is_named(tiny):
    with pytest.raises(ValueError, match=r"f\.jsonl:3: no gold answer: expected one of answer, label"):
        prompt_records([row(), row(answer=None, line=3)], tiny, name="f", max_prompt_tokens=20)
    with pytest.raises(ValueError, match=r"f\.jsonl:3: no response to imitate: expected one of response"):
        sft_examples([row(line=3)], tiny, name="f", max_prompt_tokens=20, max_response_tokens=9)


def test_a_template_that_refuses_names_the_row(tiny):
    tokenizer = load_tokenizer(builtin_model_dir("tiny"))
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ValueError, match=r"f\.jsonl:4: the chat template refuses"):
        prompt_records([row(line=4)], tokenizer, name="f", max_prompt_tokens=20)


def test_thinking_open(tiny, thinker):
    for tokenizer, expected in [(tiny, False), (thinker, True)]:
        records, _ = prompt_records([row("say <think>")], tokenizer, name="f", max_prompt_tokens=99)
        assert records[0].thinking_open is expected


def test_sft_examples(tiny):
    rows = [
        row("P", response="ab"),
        row("P", response=" "),
        row("P", response="abcd"),
        row("PP", response="a"),
    ]
    limit = len(encode_chat(tiny, "P"))
    examples, report = sft_examples(rows, tiny, name="f", max_prompt_tokens=limit, max_response_tokens=3)
    assert examples == [SFTExample(tuple(encode_chat(tiny, "P")), tuple(encode_response(tiny, "ab")))]
    assert examples[0].response_ids[-1] == tiny.eos_token_id
    assert str(report) == "f: 1 of 4 demonstrations kept (dropped: 1 empty, 2 too long)"


@pytest.mark.parametrize("response", ["<think>\na</think>b", "<think>a</think>b", "a</think>b"])
def test_think_is_not_opened_twice(thinker, response):
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 99}
    (example,), _ = sft_examples([row(response=response)], thinker, name="f", **limits)
    assert list(example.response_ids) == encode_response(thinker, "a</think>b")


def test_task_rows(tiny):
    task = SumTask(digits=4, early_exit_hazard=0.1, step_error_rate=0.1)
    made = demonstrations(task, 5, seed=0)
    rows = task_rows([p for p, _ in made], source="running_sum", responses=[r for _, r in made])
    examples, _ = sft_examples(rows, tiny, name="t", max_prompt_tokens=64, max_response_tokens=64)
    assert list(examples[3].response_ids) == encode_response(tiny, made[3][1])
    rows = task_rows(problems(task, 5, seed=0, split="validation"), source="running_sum")
    records, _ = prompt_records(rows, tiny, name="t", max_prompt_tokens=64)
    assert [(r.source, r.answer) for r in records] == [("running_sum", x.answer) for x in rows]


def test_each_epoch_has_every_record_once_in_a_new_order():
    stream = RecordStream(list("abcdefghij"), seed=3)
    epochs = [stream.take(10 * epoch, 10) for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list("abcdefghij")] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_position_is_all_that_a_resume_needs():
    stream = RecordStream(range(10), seed=3)
    whole = stream.take(0, 28)
    resumed = RecordStream(range(10), seed=3)
    assert resumed.take(7, 9) + resumed.take(16, 12) == whole[7:]
    assert resumed.take(7, 9) == whole[7:16]
    assert RecordStream(range(10), seed=4).take(0, 28) != whole
    assert stream.take(5, 0) == []


def test_bad_streams():
    with pytest.raises(ValueError, match="records: expected at least one"):
        RecordStream([], seed=0)
    with pytest.raises(ValueError, match="seed: expected a whole number from 0"):
        RecordStream([1], seed=-1)
    with pytest.raises(ValueError, match="position, count: expected none below 0, got -1, 2"):
        RecordStream([1], seed=0).take(-1, 2)
