"""`vcppo_jax.algos.advantages`: from one score per response to tokens."""

from __future__ import annotations

from functools import partial
from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vcppo_jax.algos import advantages as module
from vcppo_jax.algos.advantages import at_last_token, to_tokens
from vcppo_jax.algos.gae import reward_to_go
from vcppo_jax.algos.masked import whiten

group_advantages = jax.jit(module.group_advantages, static_argnames=("group_size", "mean", "std"))
rloo_advantages = jax.jit(module.rloo_advantages, static_argnames="group_size")
SCOPES = ["none", "group", "batch"]
GRPO = {"mean": "group", "std": "group"}
DR_GRPO = {"mean": "group", "std": "none"}
LITE_PPO = {"mean": "group", "std": "batch"}
EQUAL = np.float32(0.9)
CELLS = [{"mean": mean, "std": std} for mean, std in product(SCOPES, SCOPES)]


@partial(jax.jit, static_argnames=("mean", "std", "group_size"))
def compiled(scores, valid, mean, std, group_size):
    def total(scores):
        out = module.group_advantages(scores, group_size=group_size, mean=mean, std=std, valid=valid)
        return jnp.sum(out**2), out

    grad, out = jax.grad(total, has_aux=True)(scores)
    return out, grad


def evaluate(cell, scores, valid=None, group_size=3):
    """(advantages, gradient of their squares' sum); twelve scores share one compilation a cell."""
    valid = np.ones(len(scores), bool) if valid is None else valid
    return compiled(np.asarray(scores, np.float32), valid, **cell, group_size=group_size)


def loop_statistics(scores):
    """(mean, unbiased std or 0) of a list."""
    if not scores:
        return 0.0, 0.0
    mean = sum(scores) / len(scores)
    if len(scores) < 2 or max(scores) == min(scores):
        return mean, 0.0
    return mean, (sum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) ** 0.5


def loop_group(scores, group_size, mean, std, valid):
    everyone = [float(s) for s, v in zip(scores, valid) if v]
    out = []
    for start in range(0, len(scores), group_size):
        rows = range(start, start + group_size)
        group = [float(scores[i]) for i in rows if valid[i]]
        sets = {"none": (0.0, 0.0), "group": loop_statistics(group), "batch": loop_statistics(everyone)}
        for i in rows:
            divisor = sets[std][1] + 1e-6 if sets[std][1] > 0 else 1.0
            out.append((float(scores[i]) - sets[mean][0]) / divisor if valid[i] else 0.0)
    return out


def loop_rloo(scores, group_size, valid):
    out = []
    for i in range(len(scores)):
        start = i - i % group_size
        others = [float(scores[j]) for j in range(start, start + group_size) if valid[j] and j != i]
        out.append(float(scores[i]) - sum(others) / len(others) if valid[i] and others else 0.0)
    return out


def sample(seed=0):
    """Twelve scores: one NaN among three that are not valid, a group of three equal ones, one alone."""
    scores = np.random.default_rng(seed).normal(size=12).astype(np.float32)
    scores[3:6] = 0.1
    valid = np.ones(12, bool)
    valid[[1, 7, 8]] = False
    scores[7] = np.nan
    return scores, valid


@pytest.mark.parametrize(
    ("cell", "scores", "expected"),
    [
        (GRPO, [1, -1, -1, -1], [1.5, -0.5, -0.5, -0.5]),
        (DR_GRPO, [1, -1, -1, -1], [1.5, -0.5, -0.5, -0.5]),
        (GRPO, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        (DR_GRPO, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        # Eight scores with three 1 and five -1: the std of the batch is sqrt(15 / 14).
        (LITE_PPO, [1, -1, -1, -1, 1, 1, -1, -1], np.array([3, -1, -1, -1, 2, 2, -2, -2]) / 2 / 1.0350983),
    ],
)
def test_golden(cell, scores, expected):
    actual = group_advantages(np.array(scores), group_size=4, **cell)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell.values()))
def test_every_cell_equals_the_loop(cell):
    scores, valid = sample()
    actual, grad = evaluate(cell, scores, valid)
    np.testing.assert_allclose(actual, loop_group(scores, 3, **cell, valid=valid), atol=1e-4)
    assert np.all(np.isfinite(grad))
    all_valid = np.where(valid, scores, 2.0)
    expected = loop_group(all_valid, 3, **cell, valid=np.ones(12))
    np.testing.assert_allclose(evaluate(cell, all_valid)[0], expected, atol=1e-4)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell.values()))
def test_an_empty_response_is_not_read_in_value_or_gradient(cell):
    scores, valid = sample(1)
    dirty, clean = evaluate(cell, scores, valid), evaluate(cell, np.where(valid, scores, 0), valid)
    chex.assert_trees_all_equal(dirty, clean)
    for leaf in dirty:
        assert np.all(np.asarray(leaf)[~valid] == 0)
    assert np.any(np.asarray(dirty[1])[valid] != 0)


@pytest.mark.parametrize("cell", [GRPO, DR_GRPO, LITE_PPO], ids=lambda cell: "-".join(cell.values()))
def test_groups_touch_each_other_through_the_batch_only(cell):
    scores = np.random.default_rng(3).normal(size=12)
    changed = np.append(scores[:9], [-50, 3, 4])
    before, after = (evaluate(cell, x)[0][:9] for x in (scores, changed))
    assert np.array_equal(before, after) == (cell["std"] != "batch")


@pytest.mark.parametrize("std", SCOPES)
def test_equal_scores_and_a_group_of_one_are_exactly_zero_with_a_group_mean(std):
    # The rounded mean of three times .9 in float32 is not .9. Of the last group one response is not empty.
    assert np.float32(np.float32(EQUAL + EQUAL) + EQUAL) / np.float32(3) != EQUAL
    scores = [EQUAL] * 3 + [5, 6, 7.5] + [-1] * 3 + [2, 3, 4]
    actual, grad = evaluate({"mean": "group", "std": std}, scores, np.arange(12) < 10)
    assert np.all(actual[3:6] != 0)
    assert np.all(actual[:3] == 0)
    assert np.all(actual[6:] == 0)
    assert np.all(np.isfinite(grad))
    alone, grad = evaluate({"mean": "group", "std": std}, [3, -2], group_size=1)
    assert np.all(alone == 0)
    assert np.all(np.isfinite(grad))


def test_equal_scores_of_a_whole_batch_are_exactly_zero_with_a_batch_mean():
    for sign, valid in ((1, np.ones(12, bool)), (-1, np.arange(12) < 3)):
        actual, grad = evaluate({"mean": "batch", "std": "batch"}, [sign * EQUAL] * 12, valid)
        assert np.all(actual == 0)
        assert np.all(np.isfinite(grad))


def test_without_spread_nothing_is_divided():
    scores = np.array([0.5, 0.5, 2, 4])
    kept = group_advantages(scores, group_size=2, mean="none", std="group")
    np.testing.assert_allclose(kept, [0.5, 0.5, 2 / np.sqrt(2), 4 / np.sqrt(2)], rtol=1e-5)
    off_the_mean = group_advantages(scores, group_size=2, mean="batch", std="group")
    np.testing.assert_allclose(off_the_mean[:2], [-1.25, -1.25], rtol=1e-6)
    alone = group_advantages(np.array([3.0, -2.0]), group_size=1, mean="none", std="group")
    np.testing.assert_array_equal(alone, [3, -2])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell.values()))
def test_a_batch_without_a_valid_response_is_zero(cell):
    for leaf in evaluate(cell, [np.nan] * 12, np.zeros(12, bool)):
        assert np.all(leaf == 0)


def test_rloo_golden():
    actual = rloo_advantages(np.array([1, -1, -1, -1]), group_size=4)
    np.testing.assert_allclose(actual, [2, -2 / 3, -2 / 3, -2 / 3], atol=1e-5)
    assert actual.dtype == jnp.float32


def test_rloo_equals_the_loop():
    scores, valid = sample(2)
    actual = rloo_advantages(scores, group_size=3, valid=valid)
    np.testing.assert_allclose(actual, loop_rloo(scores, 3, valid), atol=1e-5)
    # Two of the third group are not valid: the one that is left has nobody to be compared with.
    assert np.all(actual[6:9] == 0)
    assert np.all(actual[3:6] == 0)
    grad = jax.grad(lambda s: jnp.sum(rloo_advantages(s, group_size=3, valid=valid) ** 2))(scores)
    assert np.all(np.isfinite(grad))


@pytest.mark.parametrize(("scores", "group_size"), [([0.1] * 7, 7), ([3, -2], 1)])
def test_rloo_of_equal_scores_and_of_a_group_of_one_is_zero(scores, group_size):
    assert np.all(rloo_advantages(np.array(scores), group_size=group_size) == 0)


def test_scores_that_do_not_fit_are_named():
    for function in (partial(module.group_advantages, **GRPO), module.rloo_advantages):
        for scores, group_size in ((np.zeros(5), 2), (np.zeros((2, 2)), 2), (np.zeros(4), 0)):
            with pytest.raises(ValueError, match=f"multiple of group_size {group_size}, got shape"):
                function(scores, group_size=group_size)
        with pytest.raises(ValueError, match=r"_advantages: expected scores .*\[3\], got \[4\]"):
            function(np.zeros(4), group_size=2, valid=np.ones(3))
    with pytest.raises(
        ValueError, match=r"expected std as one of \['none', 'group', 'batch'\], got 'prompt'"
    ):
        module.group_advantages(np.zeros(4), group_size=2, mean="group", std="prompt")
    with pytest.raises(ValueError, match=r"expected mean as one of .*, got 'all'"):
        module.group_advantages(np.zeros(4), group_size=2, mean="all", std="none")


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


def test_reinforce_plus_plus_golden():
    """Score on the last token, reward-to-go, whitened over the batch; an empty response changes nothing."""
    mask = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    rewards = at_last_token(np.array([1, -1, 7]), mask)
    actual = whiten(reward_to_go(rewards, mask, gamma=1.0), mask)
    np.testing.assert_allclose(actual, [[0.730297] * 3, [-1.095445, -1.095445, 0], [0] * 3], atol=1e-5)


def test_reinforce_plus_plus_with_a_baseline_equals_the_loop():
    """Score less the group's mean on every token, whitened over the batch's tokens, with a gap and a hole."""
    scores = np.array([1.0, -1, 5, -1, 1, 1])
    mask = np.array([[1, 0, 1, 1], [1, 1, 0, 0], [0] * 4, [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    centred = group_advantages(scores, group_size=3, mean="group", std="none", valid=mask.any(-1))
    actual = whiten(to_tokens(centred, mask), mask)
    rows = [1.0, -1.0, 0.0, -4 / 3, 2 / 3, 2 / 3]
    tokens = [row for row, m in zip(rows, mask) for _ in range(m.sum())]
    mean, std = loop_statistics(tokens)
    expected = [[(row - mean) / std if valid else 0.0 for valid in m] for row, m in zip(rows, mask)]
    np.testing.assert_allclose(actual, expected, atol=1e-5)
