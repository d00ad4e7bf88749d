"""`vcppo_jax.algos.masked`: statistics that never see padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vcppo_jax.algos import masked

# Jitted once, so that tests on one shape share a compilation.
masked_mean = jax.jit(masked.masked_mean, static_argnames="axis")
masked_var = jax.jit(masked.masked_var, static_argnames="axis")
whiten = jax.jit(masked.whiten)
explained_variance = jax.jit(masked.explained_variance)
masked_correlation = jax.jit(masked.masked_correlation)

BAD = [np.nan, np.inf, -np.inf]


def sample(seed=0, shape=(3, 5)):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, *shape))
    mask = rng.random(shape) < 0.6
    mask[0, :2] = True
    mask[0, 2] = False
    return x, y, mask


def test_mean_and_variance_equal_numpy_over_the_valid_slots():
    x, _, mask = sample()
    np.testing.assert_allclose(masked_mean(x, mask), x[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(masked_var(x, mask), x[mask].var(ddof=1), rtol=1e-5)
    mask[0] = [1, 1, 0, 1, 0]
    np.testing.assert_allclose(masked_mean(x, mask, axis=-1)[0], x[0][mask[0]].mean(), rtol=1e-5)
    np.testing.assert_allclose(masked_var(x, mask, axis=-1)[0], x[0][mask[0]].var(ddof=1), rtol=1e-5)


def test_mean_and_variance_of_nothing_are_zero():
    assert masked_mean(np.ones(2), np.zeros(2)) == 0
    assert masked_var(np.arange(2.0), np.zeros(2)) == 0
    assert masked_var(np.arange(2.0), np.array([0, 1])) == 0


def test_variance_of_equal_values_is_exactly_zero():
    # The rounded mean of these in float32 is not .1, so that the plain formula gives more than 0.
    assert masked_var(np.full(7, 0.1), np.ones(7)) == 0


@pytest.mark.parametrize(
    ("x", "mask", "expected"),
    [
        ([1, 3], [1, 1], [-0.707107, 0.707107]),
        ([1, 50, 3], [1, 0, 1], [-0.707107, 0, 0.707107]),
        ([2, 2, 2], [1, 1, 1], [0, 0, 0]),
        ([0.1] * 7, [1] * 7, [0] * 7),
        ([5], [1], [5]),
        ([9, 5, 9], [0, 1, 0], [0, 5, 0]),
        ([9, 5, 9], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_whiten_golden(x, mask, expected):
    whitened = whiten(np.array(x), np.array(mask))
    assert whitened.dtype == jnp.float32
    np.testing.assert_allclose(whitened, expected, atol=1e-5)


def test_whiten_equals_numpy():
    x, _, mask = sample(1)
    expected = np.where(mask, (x - x[mask].mean()) / x[mask].std(ddof=1), 0)
    np.testing.assert_allclose(whiten(x, mask), expected, atol=1e-5)


def test_whiten_vmaps():
    x, _, mask = sample(2)
    rows = jax.vmap(whiten)(jnp.asarray(x), jnp.asarray(mask))
    for row, x_row, mask_row in zip(rows, x, mask):
        np.testing.assert_allclose(row, whiten(x_row, mask_row), atol=1e-6)


def test_explained_variance_equals_numpy():
    values, returns, mask = sample(3)
    v, g = values[mask], returns[mask]
    np.testing.assert_allclose(
        explained_variance(values, returns, mask), 1 - np.var(g - v) / np.var(g), rtol=1e-4
    )


def test_explained_variance_of_perfect_shifted_and_constant_values():
    returns, mask = np.array([1.0, -1, 1, 7]), np.array([1, 1, 1, 0])
    np.testing.assert_allclose(explained_variance(returns, returns, mask), 1)
    np.testing.assert_allclose(explained_variance(returns + 2, returns, mask), 1, atol=1e-6)
    np.testing.assert_allclose(explained_variance(np.zeros(4), returns, mask), 0, atol=1e-6)
    np.testing.assert_allclose(explained_variance(-returns, returns, mask), -3, atol=1e-5)


@pytest.mark.parametrize("mask", [[1, 1, 1], [1, 0, 0], [0, 0, 0]])
def test_explained_variance_is_zero_where_returns_do_not_vary(mask):
    assert explained_variance(np.arange(3.0), np.full(3, 0.1), np.array(mask)) == 0


def test_correlation_equals_numpy():
    x, y, mask = sample(4)
    np.testing.assert_allclose(masked_correlation(x, y, mask), np.corrcoef(x[mask], y[mask])[0, 1], atol=1e-5)
    np.testing.assert_allclose(masked_correlation(x, -2 * x + 1, mask), -1, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "mask"), [([0.1] * 3, [1, 1, 1]), ([1, 2, 3], [0, 1, 0]), ([1, 2, 3], [0] * 3)]
)
def test_correlation_without_variation_is_zero(x, mask):
    x, y, mask = np.array(x, float), np.arange(3.0), np.array(mask)
    assert masked_correlation(x, y, mask) == 0
    assert masked_correlation(y, x, mask) == 0


FUNCTIONS = {
    "masked_mean": lambda x, mask: masked_mean(x, mask),
    "masked_var": lambda x, mask: masked_var(x, mask),
    "whiten": lambda x, mask: jnp.sum(whiten(x, mask) ** 3),
    "explained_variance values": lambda x, mask: explained_variance(x, jnp.arange(15.0).reshape(3, 5), mask),
    "explained_variance returns": lambda x, mask: explained_variance(jnp.ones((3, 5)), x, mask),
    "masked_correlation": lambda x, mask: masked_correlation(x, jnp.arange(15.0).reshape(3, 5), mask),
}
GRADIENTS = {name: jax.jit(jax.value_and_grad(function)) for name, function in FUNCTIONS.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masked_slots_harm_neither_value_nor_gradient(name):
    x, _, mask = sample(5)
    dirty = x.copy()
    dirty[~mask] = np.resize(BAD, (~mask).sum())
    value_and_grad = GRADIENTS[name]
    value, grad = value_and_grad(jnp.asarray(x, jnp.float32), mask)
    dirty_value, dirty_grad = value_and_grad(jnp.asarray(dirty, jnp.float32), mask)
    np.testing.assert_array_equal(dirty_value, value)
    np.testing.assert_array_equal(dirty_grad, grad)
    assert np.all(np.asarray(grad)[~mask] == 0)
    assert np.any(np.asarray(grad)[mask] != 0)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ["no valid token", "one valid token", "equal values"])
def test_gradients_are_finite_at_the_edges(name, kind):
    x, mask = jnp.full((3, 5), 0.1), np.zeros((3, 5), bool)
    if kind == "one valid token":
        mask[1, 1] = 1
    elif kind == "equal values":
        mask[:, :3] = 1
    value, grad = GRADIENTS[name](x, mask)
    assert np.isfinite(value)
    assert np.all(np.isfinite(grad))


def test_numpy_arrays_and_lists_outside_jit():
    np.testing.assert_allclose(masked.whiten([1, 50, 3], [1, 0, 1]), [-0.707107, 0, 0.707107], atol=1e-5)
    np.testing.assert_allclose(masked.explained_variance(np.arange(3.0), np.arange(3.0), [1, 1, 1]), 1)


def test_a_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"explained_variance: expected returns .*\[3\], got \[2\]"):
        explained_variance(np.zeros(3), np.zeros(2), np.ones(3))
