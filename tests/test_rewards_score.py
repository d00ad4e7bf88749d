from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vcppo_jax.rewards.score import REASONS, Verdict, count_reasons, verify

CASES = Path(__file__).parents[1].parent / "shared" / "cases" / "verifier.jsonl"


def only(response, gold, **kwargs):
    """The verdict of one sample."""
    (verdict,) = verify([response], [gold], **{name: [value] for name, value in kwargs.items()})
    return verdict


@pytest.mark.parametrize(
    ("response", "gold", "reason"),
    [
        (r"<think>hm</think>It is \boxed{17}.", "17", "correct"),
        (r"It is \boxed{17}.", "17", "correct"),  # no tags: graded whole
        (r"hm</think>It is \boxed{17}.", "17", "correct"),
        (r"<think>\boxed{16}</think>\boxed{17}", "17", "correct"),
        (r"<think>\boxed{17}</think>seventeen", "17", "no_answer"),
        (r"<think>\boxed{17}", "17", "unclosed_think"),
        (r"<think>a</think>b<think>\boxed{17}", "17", "unclosed_think"),
        (r"a</think>\boxed{16}</think>\boxed{17}", "17", "correct"),
        (r"\boxed{17} or \boxed{18}", "17", "wrong"),
        (r"\boxed{17} or \boxed{18", "17", "no_answer"),
        (r"\boxed{17}" + " and that is it." * 500, "17", "correct"),
        ("It is 17.", "17", "no_answer"),
        ("", "17", "no_answer"),
        (r"\boxed{}", "17", "no_answer"),
        (r"\boxed{ {} }", "17", "no_answer"),
        (r"<think></think><answer>17</answer>", "17", "no_answer"),
        (r"\boxed{\text{}}", "17", "wrong"),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", "correct"),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{7}", "wrong"),
        (r"\boxed{17}", 17, "correct"),
        (r"\boxed{17}", np.int64(17), "correct"),
        (r"\boxed{0.5}", 0.5, "correct"),
        (r"\boxed{17}", "$17$", "correct"),
        (r"\boxed{17}", r"$\boxed{17}$", "correct"),
        (r"\boxed{17}", r"\boxed{\frac{34}{2}}", "correct"),
        ("\\boxed{1\x007}", "17", "correct"),
        ("\\boxed{\ud800x}", "x+1", "wrong"),
        (r"\boxed{" + "{" * 5000 + "17" + "}" * 5000 + "}", "17", "wrong"),
    ],
)
def test_score_and_reason(response, gold, reason):
    assert only(response, gold) == Verdict(1.0 if reason == "correct" else -1.0, reason)


def test_a_truncated_response_scores_minus_one_whatever_it_holds():
    assert only(r"\boxed{17}", "17", truncated=True) == (-1.0, "truncated")
    assert only(r"<think>", "17", truncated=True) == (-1.0, "truncated")
    assert only(r"\boxed{17}", "17", truncated=np.bool_(False)) == (1.0, "correct")


def test_a_prompt_that_opened_the_thinking():
    assert only(r"\boxed{17}", "17", thinking_open=True) == (-1.0, "unclosed_think")
    assert only(r"so</think>\boxed{17}", "17", thinking_open=True) == (1.0, "correct")
    assert only(r"\boxed{17}", "17", thinking_open=False) == (1.0, "correct")


def test_one_verdict_per_sample_in_order_with_repeats():
    answers = [r"\sqrt{8}", "3", r"\sqrt{8}", r"\sqrt{9}", "x", r"2\sqrt{2}"] * 3
    verdicts = verify([rf"\boxed{{{answer}}}" for answer in answers], [r"2\sqrt2"] * len(answers))
    assert [score for score, _ in verdicts] == [1.0, -1.0, 1.0, -1.0, -1.0, 1.0] * 3
    assert verify([], []) == []


def test_count_reasons_has_every_reason():
    counts = count_reasons(verify([r"\boxed{1}", r"\boxed{2}", ""], [1, 1, 1]))
    assert set(counts) == set(REASONS)
    assert (counts["correct"], counts["wrong"], counts["no_answer"], counts["timeout"]) == (1, 1, 1, 0)
    assert sum(counts.values()) == 3


@pytest.mark.parametrize("gold", ["", "  ", "$$", r"\boxed{}", None, [1], {"a": 1}, b"1"])
def test_a_gold_that_is_no_answer_is_named(gold):
    with pytest.raises(ValueError, match=r"golds\[1\]"):
        verify(["a", "b"], ["1", gold])


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"golds: expected one per response, 2, got 1"):
        verify(["a", "b"], ["1"])
    with pytest.raises(ValueError, match=r"truncated: expected one per response, 1, got 2"):
        verify(["a"], ["1"], truncated=[True, False])
    with pytest.raises(ValueError, match=r"thinking_open: expected one per response, 1, got 0"):
        verify(["a"], ["1"], thinking_open=[])
    with pytest.raises(ValueError, match=r"responses\[1\]: expected a string, got int"):
        verify(["a", 3], ["1", "2"])
    with pytest.raises(ValueError, match="responses: expected a list"):
        verify("a", ["1"])
    with pytest.raises(ValueError, match="golds: expected a list"):
        verify(["a"], "1")
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        verify([r"\boxed{x}"], ["y"], timeout_s=0)


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases/verifier.jsonl is not here")
def test_shared_cases_come_out_as_written():
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    verdicts = verify([case["response"] for case in cases], [case["gold"] for case in cases])
    assert cases
    failed = [(case, v) for case, v in zip(cases, verdicts) if v.score != case["score"]]
    assert not failed
