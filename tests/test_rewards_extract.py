from __future__ import annotations

import time

import pytest

from vcppo_jax.rewards.extract import after_thinking, last_box


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("no tags at all", "no tags at all"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # the prompt opened the thinking
        ("<think>a</think>b</think>c", "c"),
        ("<think>a</think>", ""),
        ("<think>a", None),
        ("a<think>", None),
        ("<think>a</think>b<think>c", None),  # opened again, never closed
    ],
)
def test_after_thinking(response, expected):
    assert after_thinking(response) == expected


def test_a_prompt_that_opened_the_thinking_needs_a_closing_tag():
    assert after_thinking(r"\boxed{1}", thinking_open=True) is None
    assert after_thinking(r"done</think>\boxed{1}", thinking_open=True) == r"\boxed{1}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7} holds", "7"),
        (r"\boxed {7}", "7"),
        ("\\boxed\n {7}", "7"),
        (r"\boxed{{7}}", "{7}"),
        (r"\boxed{\frac{1}{{2}}}", r"\frac{1}{{2}}"),
        (r"\boxed{7} no, \boxed{8}", "8"),
        (r"\boxed{7} no, \boxed{8", None),  # the last box counts, and it is no answer
        (r"\boxed{7", None),
        (r"\boxed{x = \boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),  # an escaped brace does not nest
        (r"\boxed{a \\}", r"a \\"),
        (r"\boxed{}", ""),
        (r"\boxed 7", None),
        (r"\boxedfoo{7}", None),
        ("7", None),
        ("", None),
    ],
)
def test_last_box(text, expected):
    assert last_box(text) == expected


def test_hostile_text_is_read_in_linear_time_and_without_recursion():
    depth = 200_000
    started = time.perf_counter()
    assert last_box(r"\boxed{" + "{" * depth + "}" * depth + "}") == "{" * depth + "}" * depth
    assert last_box(r"\boxed{" + "{" * depth) is None
    assert last_box(r"\boxed{" * depth) is None
    assert last_box(r"\boxed" * depth + " " * depth) is None
    assert last_box("\x00\ud800\\boxed{\ud800}") == "\ud800"
    assert time.perf_counter() - started < 5.0
