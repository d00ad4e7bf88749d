"""`vcppo_jax.algos.policy.importance_weights` against a NumPy loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_oracles import sample

from vcppo_jax.algos import policy

importance_weights = jax.jit(policy.importance_weights, static_argnames=("level", "cap"))


def loop_weights(trainer, engine, mask, level, cap):
    out = np.zeros(mask.shape)
    for b, row in enumerate(mask):
        tokens = np.flatnonzero(row)
        differences = [float(trainer[b, t]) - float(engine[b, t]) for t in tokens]
        for t, difference in zip(tokens, differences):
            out[b, t] = min(np.exp(sum(differences) if level == "sequence" else difference), cap)
    return out


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_equal_the_loop(level):
    trainer, engine, _, mask = sample(0)
    weights = importance_weights(trainer, engine, mask, level=level, cap=2.0)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, loop_weights(trainer, engine, mask, level, 2.0), rtol=1e-5)
    assert 0 < np.sum(np.asarray(weights) == 2) < mask.sum()


@pytest.mark.parametrize(("level", "expected"), [("token", [1.5, 0.5, 0]), ("sequence", [0.75, 0.75, 0])])
def test_weights_golden(level, expected):
    trainer, mask = np.log([[1.5, 0.5, 9.0]]), np.array([[1, 1, 0]])
    weights = importance_weights(trainer, np.zeros((1, 3)), mask, level=level, cap=5.0)
    np.testing.assert_allclose(weights, [expected], rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_engines_give_one_and_a_far_one_gives_the_cap(level):
    trainer, _, _, mask = sample(1)
    np.testing.assert_array_equal(importance_weights(trainer, trainer, mask, level=level, cap=2.0), mask)
    far = importance_weights(trainer + 1000, trainer, mask, level=level, cap=2.0)
    np.testing.assert_array_equal(far, 2.0 * mask)
    uncapped = importance_weights(trainer + 1000, trainer, mask, level=level, cap=np.inf)
    np.testing.assert_allclose(uncapped, np.exp(20.0) * mask, rtol=1e-5)
    near_zero = importance_weights(trainer - 1000, trainer, mask, level=level, cap=2.0)
    assert np.all(near_zero <= 1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_slots_harm_nothing_and_there_is_no_gradient(level):
    trainer, engine, _, mask = sample(2)
    expected = importance_weights(trainer, engine, mask, level=level, cap=2.0)
    trainer[~mask], engine[~mask] = np.nan, np.inf
    np.testing.assert_array_equal(importance_weights(trainer, engine, mask, level=level, cap=2.0), expected)

    def total(trainer, engine):
        return jnp.sum(importance_weights(trainer, engine, mask, level=level, cap=2.0))

    for grad in jax.grad(total, (0, 1))(trainer, engine):
        assert np.all(grad == 0)


def test_an_all_masked_batch_is_zero():
    bad = np.full((2, 3), np.nan)
    assert np.all(importance_weights(bad, bad, np.zeros((2, 3)), level="sequence", cap=2.0) == 0)


def test_bad_input_is_named():
    x = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"level as one of \['token', 'sequence'\], got 'batch'"):
        importance_weights(x, x, x, level="batch", cap=2.0)
    with pytest.raises(ValueError, match=r"importance_weights: expected a positive cap, got 0"):
        importance_weights(x, x, x, level="token", cap=0)
    with pytest.raises(ValueError, match=r"importance_weights: expected engine_logprobs .*got \[3\]"):
        importance_weights(x, np.zeros(3), x, level="token", cap=2.0)
