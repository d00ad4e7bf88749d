"""`vcppo_jax.algos.shaping` against NumPy loops and known values."""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vcppo_jax.algos import shaping
from vcppo_jax.algos.shaping import RunningMoments, adaptive_kl_coef, no_moments, scale_scores

update_moments = jax.jit(shaping.update_moments)
normalize_by_moments = jax.jit(shaping.normalize_by_moments)
bradley_terry_loss = jax.jit(shaping.bradley_terry_loss)


@pytest.mark.parametrize(("scale", "expected"), [("plus_minus_one", [-1, 1, 0]), ("zero_one", [0, 1, 0.5])])
def test_scale_scores(scale, expected):
    scaled = scale_scores(np.array([-1, 1, 0]), scale)
    np.testing.assert_array_equal(scaled, expected)
    assert scaled.dtype == jnp.float32


def test_unknown_scale_is_named():
    with pytest.raises(ValueError, match=r"scale as one of \['plus_minus_one', 'zero_one'\], got 'percent'"):
        scale_scores(np.zeros(1), "percent")


def loop_overlong(length, max_length, buffer):
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return (max_length - buffer - length) / buffer
    return -1.0


@pytest.mark.parametrize(("max_length", "buffer"), [(20480, 4096), (10, 10), (10, 1)])
def test_soft_overlong_penalty_equals_the_loop(max_length, buffer):
    edges = [0, 1, max_length - buffer, max_length - buffer // 2, max_length, max_length + 1, 2 * max_length]
    actual = jax.jit(lambda n: shaping.soft_overlong_penalty(n, max_length=max_length, buffer=buffer))(
        np.array(edges)
    )
    np.testing.assert_allclose(actual, [loop_overlong(n, max_length, buffer) for n in edges], atol=1e-6)
    assert actual.dtype == jnp.float32


def test_soft_overlong_penalty_golden():
    # DAPO's numbers: half of the buffer used up costs a half.
    actual = shaping.soft_overlong_penalty([16384, 18432, 20480, 20481], max_length=20480, buffer=4096)
    np.testing.assert_allclose(actual, [0, -0.5, -1, -1])


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_that_does_not_fit_is_named(buffer):
    with pytest.raises(ValueError, match=rf"buffer in \[1, max_length 10\], got {buffer}"):
        shaping.soft_overlong_penalty([1], max_length=10, buffer=buffer)


# --- running normalisation ---------------------------------------------------------------------------


def batches(seed=0):
    """Five batches of six scores around 100 with NaN where not valid; one has no valid score, one has one."""
    rng = np.random.default_rng(seed)
    scores = (100 + rng.normal(size=(5, 6))).astype(np.float32)
    valid = rng.random((5, 6)) < 0.7
    valid[1], valid[3] = False, np.arange(6) == 2
    scores[~valid] = np.nan
    return scores, valid


def test_moments_of_batches_are_those_of_all_scores():
    scores, valid = batches()
    moments = no_moments()
    for batch in zip(scores, valid):
        moments = update_moments(moments, *batch)
    seen = scores[valid].astype(np.float64)
    assert moments.count == len(seen)
    np.testing.assert_allclose(moments.mean, seen.mean(), rtol=1e-6)
    np.testing.assert_allclose(moments.m2, ((seen - seen.mean()) ** 2).sum(), rtol=1e-4)
    assert {x.dtype for x in moments} == {jnp.dtype("float32")}
    actual = normalize_by_moments(scores[0], moments)
    np.testing.assert_allclose(
        np.asarray(actual)[valid[0]], (scores[0][valid[0]] - seen.mean()) / seen.std(ddof=1), atol=2e-4
    )


def test_a_batch_without_a_valid_score_changes_nothing():
    scores, valid = batches(1)
    moments = update_moments(no_moments(), scores[0], valid[0])
    after = update_moments(moments, scores[1], valid[1])
    chex.assert_trees_all_equal(after, moments)
    jax.tree.map(
        np.testing.assert_array_equal, update_moments(no_moments(), *(scores[1], valid[1])), no_moments()
    )


def test_moments_do_not_cancel():
    """Sums of squares in float32 would lose a spread of 1 around 1e4."""
    scores, ones = np.random.default_rng(2).normal(1e4, 1, (20, 32)).astype(np.float32), np.ones(32)
    moments = no_moments()
    for batch in scores:
        moments = update_moments(moments, batch, ones)
    std = math.sqrt(float(moments.m2) / (float(moments.count) - 1))
    assert std == pytest.approx(scores.astype(np.float64).std(ddof=1), rel=1e-2)


def test_without_a_spread_scores_are_only_centred():
    np.testing.assert_array_equal(normalize_by_moments(np.array([3.0, -1.0]), no_moments()), [3, -1])
    one = update_moments(no_moments(), np.array([2.0, np.nan]), np.array([1, 0]))
    np.testing.assert_array_equal(normalize_by_moments(np.array([3.0, -1.0]), one), [1, -3])
    equal = update_moments(no_moments(), np.full(7, 0.1), np.ones(7))
    assert equal.m2 == 0
    np.testing.assert_allclose(normalize_by_moments(np.array([0.1, 1.1]), equal), [0, 1], atol=1e-6)
    gradient = jax.grad(lambda s: jnp.sum(normalize_by_moments(s, equal)))(jnp.zeros(2))
    np.testing.assert_array_equal(gradient, [1, 1])


def test_equal_scores_of_many_batches_stay_small():
    """Rounding may leave a trace of a spread, which the floor keeps from being scaled up."""
    moments = no_moments()
    for count in (7, 3, 5, 6, 3, 5):
        moments = update_moments(moments, np.full(7, 0.1), np.arange(7) < count)
    assert np.all(np.abs(normalize_by_moments(np.full(2, 0.1), moments)) < 0.1)


def test_moments_are_a_pytree_and_name_a_wrong_shape():
    assert len(jax.tree.leaves(no_moments())) == 3
    assert RunningMoments._fields == ("count", "mean", "m2")
    with pytest.raises(ValueError, match=r"update_moments: expected scores .*\[3\], got \[2\]"):
        shaping.update_moments(no_moments(), np.zeros(2), np.ones(3))


# --- reward model ------------------------------------------------------------------------------------


def test_bradley_terry_equals_the_loop():
    chosen, rejected = np.random.default_rng(3).normal(size=(2, 8))
    loss, accuracy = bradley_terry_loss(chosen, rejected)
    expected = [-math.log(1 / (1 + math.exp(r - c))) for c, r in zip(chosen, rejected)]
    np.testing.assert_allclose(loss, sum(expected) / 8, rtol=1e-5)
    np.testing.assert_allclose(accuracy, sum(c > r for c, r in zip(chosen, rejected)) / 8)
    assert 0 < accuracy < 1
    assert loss.dtype == accuracy.dtype == jnp.float32


def test_bradley_terry_golden_gradient_and_stability():
    loss, accuracy = shaping.bradley_terry_loss([0.0], [0.0])
    assert (float(loss), float(accuracy)) == (pytest.approx(math.log(2)), 0)
    for difference, value, slope in ((1000.0, 0, 0), (-1000.0, 1000, -1), (0.0, math.log(2), -0.5)):
        chosen = jnp.array([difference])
        (loss, _), grad = jax.value_and_grad(bradley_terry_loss, has_aux=True)(chosen, jnp.zeros(1))
        assert float(loss) == pytest.approx(value)
        assert float(grad[0]) == pytest.approx(slope)


def test_bradley_terry_names_a_wrong_shape():
    with pytest.raises(ValueError, match=r"bradley_terry_loss: expected rejected .*\[3\], got \[2\]"):
        shaping.bradley_terry_loss(np.zeros(3), np.zeros(2))


# --- KL coefficient ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),
        (6.6, 0.1 * 1.01),
        (60.0, 0.1 * 1.02),
        (0.0, 0.1 * 0.98),
        (5.4, 0.1 * 0.99),
        (-1.0, 0.1 * 0.98),
    ],
)
def test_adaptive_kl_coef(kl, expected):
    coef = adaptive_kl_coef(0.1, kl, target=6.0, horizon=10000, samples=1000)
    assert isinstance(coef, float)
    assert coef == pytest.approx(expected)


def test_the_coefficient_drives_the_kl_to_its_target():
    """In a world where the KL is .6 over the coefficient, both settle: 6 at .1."""
    coef = 1.0
    for _ in range(400):
        coef = adaptive_kl_coef(coef, 0.6 / coef, target=6.0, horizon=1000, samples=256)
    assert coef == pytest.approx(0.1, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 0}, "positive target and horizon, got 0 and 1000"),
        ({"horizon": -1}, "positive target and horizon, got 6.0 and -1"),
        ({"samples": 5000}, "horizon above 0.2 x 5000 samples, got 1000"),
        ({"kl": math.nan}, "finite kl, got nan"),
    ],
)
def test_bad_controllers_are_named(change, message):
    arguments = {"kl": 1.0, "target": 6.0, "horizon": 1000, "samples": 10} | change
    with pytest.raises(ValueError, match=f"adaptive_kl_coef: expected a {message}"):
        adaptive_kl_coef(0.1, **arguments)
