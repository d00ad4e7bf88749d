"""`vcppo_jax.algos.advantages`: from one score per response to tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vcppo_jax.algos.advantages import at_last_token, grpo_advantages, to_tokens

grpo = jax.jit(grpo_advantages, static_argnames="group_size")


@partial(jax.jit, static_argnames="group_size")
def squared_grpo_and_gradient(scores, group_size):
    return jax.value_and_grad(lambda s: jnp.sum(grpo_advantages(s, group_size=group_size) ** 2))(scores)


def loop_grpo(scores, group_size):
    advantages = []
    for start in range(0, len(scores), group_size):
        group = [float(s) for s in scores[start : start + group_size]]
        mean = sum(group) / len(group)
        squares = sum((s - mean) ** 2 for s in group)
        std = (squares / (len(group) - 1)) ** 0.5 if len(group) > 1 else 0.0
        advantages += [(s - mean) / (std + 1e-6) for s in group]
    return advantages


def test_grpo_golden():
    np.testing.assert_allclose(
        grpo(np.array([1, -1, -1, -1]), group_size=4), [1.5, -0.5, -0.5, -0.5], atol=1e-5
    )


@pytest.mark.parametrize("group_size", [2, 3, 6])
def test_grpo_equals_the_loop(group_size):
    scores = np.random.default_rng(0).normal(size=12)
    advantages = grpo(scores, group_size=group_size)
    assert advantages.dtype == jnp.float32
    np.testing.assert_allclose(advantages, loop_grpo(scores, group_size), atol=1e-4)


def test_grpo_groups_do_not_touch_each_other():
    scores = np.array([1.0, -1, 1, 1, 5, 6])
    changed = np.array([1.0, -1, 1, 1, -50, 6])
    np.testing.assert_array_equal(grpo(scores, group_size=2)[:4], grpo(changed, group_size=2)[:4])


@pytest.mark.parametrize(("scores", "group_size"), [([0.1] * 7, 7), ([1, 1, -1, -1], 2), ([3, -2], 1)])
def test_grpo_of_equal_scores_and_of_a_group_of_one_is_zero(scores, group_size):
    scores = np.array(scores, np.float32)
    value, grad = squared_grpo_and_gradient(scores, group_size)
    assert np.all(grpo(scores, group_size=group_size) == 0)
    assert value == 0
    assert np.all(np.isfinite(grad))


@pytest.mark.parametrize(
    ("scores", "group_size"), [(np.zeros(5), 2), (np.zeros((2, 2)), 2), (np.zeros(4), 0)]
)
def test_grpo_refuses_groups_that_do_not_fit(scores, group_size):
    with pytest.raises(ValueError, match=f"multiple of group_size {group_size}, got shape"):
        grpo_advantages(scores, group_size=group_size)


MASK = np.array([[1, 1, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])


def test_to_tokens():
    tokens = to_tokens(np.array([2, -3, np.nan]), MASK)
    np.testing.assert_array_equal(tokens, [[2, 2, 0, 2, 0], [0, -3, 0, 0, 0], [0] * 5])


def test_at_last_token():
    rewards = jax.jit(at_last_token)(np.array([2, -3, np.nan]), MASK)
    np.testing.assert_array_equal(rewards, [[0, 0, 0, 2, 0], [0, -3, 0, 0, 0], [0] * 5])
    assert rewards.dtype == jnp.float32


@pytest.mark.parametrize("function", [to_tokens, at_last_token])
def test_tokens_refuse_wrong_shapes(function):
    with pytest.raises(ValueError, match=rf"{function.__name__}: .*got \[2\] and \[3, 5\]"):
        function(np.zeros(2), MASK)
