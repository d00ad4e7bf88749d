"""`vcppo_jax.algos.losses` against NumPy loops, golden values and splits of the batch."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_oracles import GOLDEN, LOSS_MASK, TOKEN_LOSS, loop_aggregate, sample

from vcppo_jax.algos import losses
from vcppo_jax.algos.losses import AGGREGATIONS

# Jitted once, so that tests on one shape share a compilation.
value_loss = jax.jit(losses.value_loss, static_argnames=("clip", "aggregation"))
token_weights = jax.jit(losses.token_weights, static_argnames=("aggregation", "norm_length"))
kl_penalty = jax.jit(losses.kl_penalty, static_argnames="kind")
weighted_sum = jax.jit(losses.weighted_sum)


def loop_value(values, old_values, returns, clip):
    loss = np.zeros(values.shape)
    for i in np.ndindex(values.shape):
        loss[i] = 0.5 * (values[i] - returns[i]) ** 2
        if clip is not None:
            near = min(max(values[i], old_values[i] - clip), old_values[i] + clip)
            loss[i] = max(loss[i], 0.5 * (near - returns[i]) ** 2)
    return loss


# --- weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", GOLDEN)
def test_aggregation_golden(aggregation):
    weights = token_weights(LOSS_MASK, aggregation=aggregation)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weighted_sum(TOKEN_LOSS, weights), GOLDEN[aggregation], atol=1e-5)
    longer = np.vstack([LOSS_MASK, np.zeros((1, 3), int)])
    extra = losses.token_weights(longer, aggregation=aggregation)
    np.testing.assert_array_equal(extra, np.vstack([weights, np.zeros((1, 3))]))


def test_golden_covers_every_mode():
    assert list(AGGREGATIONS) == list(GOLDEN)


@pytest.mark.parametrize("aggregation", GOLDEN)
@pytest.mark.parametrize("norm_length", [None, 20])
def test_aggregation_equals_the_loop(aggregation, norm_length):
    loss, _, _, mask = sample(1)
    weights = token_weights(mask, aggregation=aggregation, norm_length=norm_length)
    expected = loop_aggregate(loss, mask, aggregation, 6 if norm_length is None else norm_length)
    np.testing.assert_allclose(np.sum(weights * loss), expected, rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(weights)[~mask] == 0)


@pytest.mark.parametrize("aggregation", GOLDEN)
def test_weights_of_an_all_masked_batch_are_zero(aggregation):
    # Outside jit, where XLA does not turn a product with a converted bool, 0 * NaN, into a select.
    assert np.all(losses.token_weights(np.zeros((2, 3)), aggregation=aggregation) == 0)


def test_token_mean_of_micro_batches_is_that_of_the_batch():
    mask = np.array([[1, 1, 1], [1, 0, 0]])
    weights = token_weights(mask, aggregation="token-mean")
    parts = [weighted_sum(np.ones(3), weights[0]), weighted_sum(np.array([5, np.nan, np.nan]), weights[1])]
    np.testing.assert_allclose(sum(parts), 2.0, atol=1e-6)


def test_weighted_sum_does_not_read_where_the_weight_is_zero():
    weights = jnp.array([0.5, 0.0])
    value, grad = jax.value_and_grad(weighted_sum)(jnp.array([4.0, jnp.nan]), weights)
    assert value == 2
    np.testing.assert_array_equal(grad, [0.5, 0])


# --- value loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old_value", "target", "expected"),
    [(1, 0, 1, 0.125), (1, 0, 0, 0.5), (0.3, 0, 1, 0.245), (-1, 0, 1, 2)],
)
def test_value_loss_golden(value, old_value, target, expected):
    loss, info = value_loss(
        *np.array([value, old_value, target, 1], np.float32).reshape(4, 1, 1),
        clip=0.5,
        aggregation="token-mean",
    )
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    # The clip takes a token where it makes the loss larger.
    assert info["vf_clipfrac"] == (0.5 * (value - target) ** 2 < expected - 1e-6)
    assert float(info["vpred_mean"]) == pytest.approx(value)


@pytest.mark.parametrize(("aggregation", "clip"), [("token-mean", None), *((name, 0.5) for name in GOLDEN)])
def test_value_loss_equals_the_loop(aggregation, clip):
    values, old, returns, mask = sample(6)
    loss, info = value_loss(values, old, returns, mask, clip=clip, aggregation=aggregation)
    expected = loop_value(values, old, returns, clip)
    np.testing.assert_allclose(loss, loop_aggregate(expected, mask, aggregation, 6), rtol=1e-5)
    taken = expected > 0.5 * (values - returns) ** 2 + 1e-6
    np.testing.assert_allclose(info["vf_clipfrac"], taken[mask].mean(), atol=1e-6)
    np.testing.assert_allclose(info["vpred_mean"], values[mask].mean(), atol=1e-6)


def test_without_a_clip_old_values_are_not_read():
    values, old, returns, mask = sample(7)
    with_old = value_loss(values, old, returns, mask, clip=None, aggregation="token-mean")[0]
    without = value_loss(values, None, returns, mask, clip=None, aggregation="token-mean")[0]
    assert with_old == without


def test_value_gradient_is_the_error_and_targets_get_none():
    values, old, returns, mask = sample(8)

    def loss(values, old, returns):
        return value_loss(values, old, returns, mask, clip=None, aggregation="token-sum")[0]

    grads = jax.grad(loss, (0, 1, 2))(values, old, returns)
    np.testing.assert_allclose(grads[0], np.where(mask, values - returns, 0), atol=1e-6)
    assert not np.any(grads[1])
    assert not np.any(grads[2])


def test_value_micro_batches_add_up():
    values, old, returns, mask = sample(9)
    run = partial(value_loss, clip=0.5, aggregation="token-mean")
    whole, info = run(values, old, returns, mask)
    weights = token_weights(mask, aggregation="token-mean")
    parts = [
        run(values[r], old[r], returns[r], mask[r], weights=weights[r], info_weights=weights[r])
        for r in (slice(0, 1), slice(1, 3), slice(3, 8))
    ]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole, atol=1e-5)
    for name, x in info.items():
        np.testing.assert_allclose(sum(i[name] for _, i in parts), x, atol=1e-5)


def run_value(x, y, z, mask, aggregation, **weights):
    return value_loss(x, y, z, mask, clip=0.5, aggregation=aggregation, **weights)


def test_masked_slots_harm_neither_value_nor_gradient():
    *arrays, mask = sample(10)
    weights = np.asarray(token_weights(mask, aggregation="seq-mean-token-mean"))
    dirty, dirty_weights = [x.copy() for x in arrays], weights.copy()
    for x, bad in zip([*dirty, dirty_weights], [np.nan, np.inf, -np.inf, np.nan]):
        x[~mask] = bad

    def run(x, rest, weights):
        return run_value(x, *rest, mask, None, weights=weights, info_weights=weights)

    run = jax.jit(jax.value_and_grad(run, has_aux=True))
    expected, actual = run(arrays[0], arrays[1:], weights), run(dirty[0], dirty[1:], dirty_weights)
    chex.assert_trees_all_equal(actual, expected)
    assert np.all(np.asarray(actual[1])[~mask] == 0)


def test_an_all_masked_batch_is_zero_in_loss_gradient_and_info():
    bad, mask = np.full((2, 3), np.nan, np.float32), np.zeros((2, 3))
    run = jax.jit(jax.value_and_grad(partial(run_value, aggregation="token-mean"), has_aux=True))
    for leaf in jax.tree.leaves(run(bad, bad, bad, mask)):
        assert np.all(leaf == 0)


def test_value_loss_vmaps():
    *arrays, mask = sample(11)
    run = partial(run_value, aggregation="token-mean")
    mapped, _ = jax.vmap(run)(*arrays, mask)
    rows = [run(*(x[i] for x in arrays), mask[i])[0] for i in range(len(mask))]
    np.testing.assert_allclose(mapped, rows, atol=1e-5)


def test_bad_input_is_named():
    x, mask = np.zeros((2, 3)), np.ones((2, 3))
    with pytest.raises(ValueError, match=r"aggregation: .*'token-mean'.*got 'tokenmean'"):
        run_value(x, x, x, mask, "tokenmean")
    with pytest.raises(ValueError, match=r"value_loss: expected aggregation, one of .*, or weights"):
        run_value(x, x, x, mask, None)
    with pytest.raises(ValueError, match=r"value_loss: expected weights .*\[2, 3\], got \[2, 4\]"):
        run_value(x, x, x, mask, None, weights=np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"value_loss: expected returns .*\[2, 3\], got \[3\]"):
        run_value(x, x, np.zeros(3), mask, "token-mean")


def test_bounds_out_of_range_are_named():
    x = np.zeros((1, 1))
    mode = {"aggregation": "token-mean"}
    with pytest.raises(ValueError, match=r"clip as a positive number .* got 0 with old_values"):
        value_loss(x, x, x, x, clip=0, **mode)
    with pytest.raises(ValueError, match=r"clip as a positive number .* got 0.5 without old_values"):
        value_loss(x, None, x, x, clip=0.5, **mode)
    with pytest.raises(ValueError, match=r"positive norm_length, got 0"):
        token_weights(x, aggregation="token-mean", norm_length=0)


def test_numpy_arrays_and_lists_outside_jit():
    loss, _ = losses.value_loss([[0.3]], [[0]], [[1]], [[1]], clip=0.5, aggregation="token-mean")
    assert float(loss) == pytest.approx(0.245)
    np.testing.assert_allclose(losses.kl_penalty([-1.0], [-2.0], kind="k3"), [0.367879], atol=1e-5)


# --- KL ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "logprob", "ref_logprob", "expected"),
    [
        ("k1", -1, -2, 1),
        ("k2", -1, -2, 0.5),
        ("k3", -1, -2, 0.367879),
        ("k1", -2, -1, -1),
        ("k2", -2, -1, 0.5),
        ("k3", -2, -1, 0.718282),
    ],
)
def test_kl_golden(kind, logprob, ref_logprob, expected):
    kl = kl_penalty(np.array([logprob]), np.array([ref_logprob]), kind=kind)
    assert kl.dtype == jnp.float32
    np.testing.assert_allclose(kl, [expected], atol=1e-5)


def test_k3_gradient_golden():
    grad = jax.grad(lambda x: kl_penalty(x, jnp.float32(-2), kind="k3"))(jnp.float32(-1))
    np.testing.assert_allclose(grad, 0.632121, atol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_equals_the_loop_and_vmaps(kind):
    logprobs, ref, _, _ = sample(12)
    formulas = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: np.exp(-d) - 1 + d}
    expected = np.zeros(logprobs.shape)
    for i in np.ndindex(logprobs.shape):
        expected[i] = formulas[kind](float(logprobs[i]) - float(ref[i]))
    run = partial(kl_penalty, kind=kind)
    np.testing.assert_allclose(run(logprobs, ref), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(run)(logprobs, ref), expected, rtol=1e-4, atol=1e-5)


def test_k3_of_a_small_difference_is_not_rounded_away():
    # exp(d) - 1 - d in float32 would be off by its rounding, 1e-7, where the value is 5e-9.
    kl = kl_penalty(np.array([-1e-4]), np.array([0.0]), kind="k3")
    np.testing.assert_allclose(kl, [5.0e-9], rtol=1e-2)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("difference", [1000.0, -1000.0])
def test_kl_far_away_stays_finite_and_never_drives_further_apart(kind, difference):
    value, grad = jax.value_and_grad(lambda x: kl_penalty(x, jnp.float32(0), kind=kind))(
        jnp.float32(difference)
    )
    assert np.isfinite(value)
    assert np.isfinite(grad)
    if kind != "k1":
        assert grad * difference >= 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_masked_kl_is_zero_in_value_and_gradient(kind):
    def total(x):
        return jnp.sum(kl_penalty(x, jnp.array([0.5, jnp.nan]), kind=kind, mask=jnp.array([1, 0])))

    value, grad = jax.value_and_grad(total)(jnp.array([1.0, jnp.inf]))
    np.testing.assert_allclose(value, kl_penalty(1.0, 0.5, kind=kind))
    assert grad[0] != 0
    assert grad[1] == 0


def test_unknown_kl_is_named():
    with pytest.raises(ValueError, match=r"kind as one of \['k1', 'k2', 'k3'\], got 'k4'"):
        kl_penalty(np.zeros(1), np.zeros(1), kind="k4")
