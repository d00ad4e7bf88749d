"""`vcppo_jax.algos.policy` against NumPy loops, golden values, and splits and packings of the batch."""

from __future__ import annotations

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_oracles import GOLDEN, loop_aggregate, sample

from vcppo_jax.algos import losses, policy
from vcppo_jax.algos.policy import POLICY_LOSSES

STATIC = ("clip_low", "clip_high", "dual_clip", "aggregation")
# Jitted once, so that tests on one shape share a compilation.
LOSSES = {name: jax.jit(loss, static_argnames=STATIC) for name, loss in POLICY_LOSSES.items()}
GRADIENTS = {
    name: jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames=STATIC)
    for name, loss in POLICY_LOSSES.items()
}
token_weights = jax.jit(losses.token_weights, static_argnames="aggregation")
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
DUAL = {"ppo": 1.5, "gspo": 1.5, "cispo": None}


def evaluate(
    name, logprobs, old, advantages, mask, weights, *, info_weights=None, segment_ids=None, **bounds
):
    """((loss, info), gradient); `weights` may name an aggregation."""
    if isinstance(weights, str):
        weights = token_weights(mask, aggregation=weights)
    if info_weights is None:
        info_weights = token_weights(mask, aggregation="token-mean")
    bounds = {**CLIP, "dual_clip": DUAL[name], **bounds}
    return GRADIENTS[name](
        logprobs,
        old,
        advantages,
        mask,
        **bounds,
        weights=weights,
        info_weights=info_weights,
        segment_ids=segment_ids,
    )


def loop_token(name, logprob, ratio, a, clip_low, clip_high, dual_clip):
    """(loss, taken by the clip, taken by the dual clip) of one token."""
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    if name == "cispo":
        return -bounded * a * logprob, bounded != ratio, False
    loss = max(-a * ratio, -a * bounded)
    if dual_clip is not None and a < 0 and loss > -a * dual_clip:
        return -a * dual_clip, -a * bounded > -a * ratio, True
    return loss, -a * bounded > -a * ratio, False


def loop_policy(name, logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip):
    """Per token: (loss, taken by the clip, taken by the dual clip, ratio); one sequence a row."""
    out = np.zeros((4, *mask.shape))
    for b, row in enumerate(mask):
        tokens = np.flatnonzero(row)
        differences = [float(logprobs[b, t]) - float(old_logprobs[b, t]) for t in tokens]
        if name == "gspo" and len(tokens):
            differences = [sum(differences) / len(tokens)] * len(tokens)
        for t, difference in zip(tokens, differences):
            ratio = np.exp(difference)
            x, a = float(logprobs[b, t]), float(advantages[b, t])
            out[:, b, t] = *loop_token(name, x, ratio, a, clip_low, clip_high, dual_clip), ratio
    return out


def one_token(name, ratio, advantage, dual_clip, logprob=0.0):
    loss, info = LOSSES[name](
        np.array([[logprob]]),
        logprob - np.log([[ratio]]),
        np.array([[advantage]]),
        np.ones((1, 1)),
        **CLIP,
        dual_clip=dual_clip,
        aggregation="token-mean",
    )
    return float(loss), {key: float(x) for key, x in info.items()}


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected", "clipped", "dual_clipped"),
    [
        (1.5, 1, 3, -1.28, 1, 0),
        (0.5, 1, 3, -0.5, 0, 0),
        (1.5, -1, 3, 1.5, 0, 0),
        (0.5, -1, 3, 0.8, 1, 0),
        (4, -1, 3, 3, 0, 1),
        (30, -1, 3, 3, 0, 1),
        (4, -1, None, 4, 0, 0),
        (30, -1, None, 30, 0, 0),
    ],
)
def test_policy_loss_golden(name, ratio, advantage, dual_clip, expected, clipped, dual_clipped):
    """Also GSPO's, whose sequence ratio is that of the only token."""
    loss, info = one_token(name, ratio, advantage, dual_clip)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert info["pg_clipfrac"] == clipped
    assert info["pg_clipfrac_lower"] == dual_clipped
    assert info["ppo_kl"] == pytest.approx(-np.log(ratio), rel=1e-5)
    assert info["ratio_mean"] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [(1.5, 1, 2.56, 1), (0.5, 1, 1.6, 1), (1.1, 1, 2.2, 0), (1.5, -1, -2.56, 1), (30, -2, -5.12, 1)],
)
def test_cispo_golden(ratio, advantage, expected, clipped):
    loss, info = one_token("cispo", ratio, advantage, None, logprob=-2.0)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert info["pg_clipfrac"] == clipped
    assert info["ratio_mean"] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", GOLDEN)
def test_loss_and_info_equal_the_loop(name, aggregation):
    batch = sample(2)
    mask = batch[-1]
    (loss, info), _ = evaluate(name, *batch, aggregation)
    token_loss, clipped, dual_clipped, ratio = loop_policy(name, *batch, **CLIP, dual_clip=DUAL[name])
    np.testing.assert_allclose(loss, loop_aggregate(token_loss, mask, aggregation, 6), rtol=1e-5, atol=1e-6)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(info["pg_clipfrac"], clipped[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(info["pg_clipfrac_lower"], dual_clipped[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(info["ppo_kl"], (batch[1] - batch[0])[mask].mean(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(info["ratio_mean"], ratio[mask].mean(), rtol=1e-5)


def test_without_a_dual_clip_equals_the_loop():
    batch = sample(2)
    (loss, _), _ = evaluate("ppo", *batch, "token-mean", dual_clip=None)
    expected = loop_policy("ppo", *batch, **CLIP, dual_clip=None)[0]
    np.testing.assert_allclose(loss, expected[batch[-1]].mean(), rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_at_the_first_update_is_that_of_the_policy_gradient(name):
    logprobs, _, advantages, mask = sample(3)
    _, grad = evaluate(name, logprobs, logprobs, advantages, mask, "token-mean")
    np.testing.assert_allclose(grad, np.where(mask, -advantages / mask.sum(), 0), atol=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logprobs, old, advantages, mask = sample(4)
    _, grad = evaluate("cispo", logprobs, old, advantages, mask, "token-sum", clip_low=1.0)
    expected = np.zeros(mask.shape)
    for b, t in np.argwhere(mask):
        expected[b, t] = -min(np.exp(logprobs[b, t] - old[b, t]), 1.28) * advantages[b, t]
    np.testing.assert_allclose(grad, expected, rtol=1e-5)
    assert np.all(grad[mask] != 0)
    _, grad = evaluate("ppo", logprobs, old, advantages, mask, "token-sum")
    assert np.any(grad[mask] == 0)


def test_gspo_is_the_papers_objective_in_value_and_gradient():
    """One advantage a sequence: 1/n sum_i max(-s_i A_i, -clip(s_i) A_i), and its derivative."""
    logprobs, old, advantages, mask = sample(5)
    logprobs, advantages = old + logprobs, np.broadcast_to(advantages[:, :1], mask.shape)
    rows = [i for i in range(len(mask)) if mask[i].any()]
    expected, expected_grad, clipped = 0.0, np.zeros(mask.shape), 0
    for i in rows:
        a, s = advantages[i, 0], np.exp(np.mean((logprobs[i] - old[i])[mask[i]]))
        bounded = min(max(s, 0.8), 1.28)
        expected += max(-s * a, -bounded * a) / len(rows)
        if -s * a >= -bounded * a:
            expected_grad[i] = mask[i] * -s * a / mask[i].sum() / len(rows)
        else:
            clipped += 1
    (loss, _), grad = evaluate("gspo", logprobs, old, advantages, mask, "seq-mean-token-mean", dual_clip=None)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-7)
    assert 0 < clipped < len(rows)


def test_gspo_keeps_an_advantage_per_token():
    logprobs, _, advantages, mask = sample(6)
    old = logprobs - 0.1  # s = exp(.1), within the bounds
    _, grad = evaluate("gspo", logprobs, old, advantages, mask, "token-sum")
    np.testing.assert_allclose(grad, np.where(mask, -np.exp(0.1) * advantages, 0), rtol=1e-4)


# --- packing -----------------------------------------------------------------------------------------


def pack(x):
    """The eight rows of `sample` in two rows of 26, four sequences each, with padding behind."""
    rows = np.zeros((2, 26), np.asarray(x).dtype)
    rows[:, :24] = np.asarray(x).reshape(2, 24)
    return rows


@pytest.mark.parametrize("name", LOSSES)
def test_packed_rows_equal_one_sequence_a_row(name):
    batch = sample(7)
    mask = batch[-1]
    ids = np.broadcast_to(np.arange(8)[:, None] % 4 + 1, mask.shape)
    weights, token_mean = (
        token_weights(mask, aggregation=aggregation) for aggregation in ("seq-mean-token-mean", "token-mean")
    )
    expected = evaluate(name, *batch, weights)
    actual = evaluate(
        name, *map(pack, batch), pack(weights), info_weights=pack(token_mean), segment_ids=pack(ids)
    )
    chex.assert_trees_all_close(actual[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual[1], pack(expected[1]), rtol=1e-5, atol=1e-7)
    assert np.any(np.asarray(actual[1]) != 0)


def test_a_row_packed_full_of_single_tokens():
    """Segment ids reach L: each token is its own sequence, and GSPO becomes PPO."""
    batch = sample(8)
    ids = np.broadcast_to(np.arange(1, 7), batch[-1].shape)
    expected = evaluate("ppo", *batch, "token-mean")
    actual = evaluate("gspo", *batch, "token-mean", segment_ids=ids)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_packed_mean_is_linear_in_memory():
    size = jax.ShapeDtypeStruct((1, 4096), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    run = partial(policy.gspo_loss, **CLIP, dual_clip=None, aggregation="token-mean")
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, y, a, m, ids: run(x, y, a, m, segment_ids=ids)[0]))(
        size, size, size, size, ids
    )
    assert "4097" in str(jaxpr)
    assert not re.search("409[67],409[67]", str(jaxpr))


# --- edges -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [30.0, -30.0, 1000.0])
@pytest.mark.parametrize(
    ("name", "dual_clip"), [("ppo", None), ("ppo", 3.0), ("gspo", None), ("gspo", 3.0), ("cispo", None)]
)
def test_a_ratio_of_e30_stays_finite(name, dual_clip, advantage, log_ratio):
    logprobs = jnp.array([[log_ratio, log_ratio], [0.0, 0.0]])
    zeros, ones = jnp.zeros((2, 2)), jnp.ones((2, 2))
    (value, info), grad = GRADIENTS[name](
        logprobs, zeros, advantage * ones, ones, **CLIP, dual_clip=dual_clip, aggregation="token-sum"
    )
    assert np.all(np.isfinite([value, *info.values()]))
    assert np.all(np.isfinite(grad))
    np.testing.assert_array_equal(grad[1], [-advantage] * 2)


@partial(jax.jit, static_argnames="name")
def part_of_loss(shift, logprobs, old, advantages, mask, weights, info_weights, name):
    """`shift` is one parameter that every token depends on, so that the parts' gradients add up."""

    def loss(shift):
        return POLICY_LOSSES[name](
            logprobs + shift,
            old,
            advantages,
            mask,
            **CLIP,
            dual_clip=DUAL[name],
            weights=weights,
            info_weights=info_weights,
        )

    return jax.value_and_grad(loss, has_aux=True)(shift)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", GOLDEN)
def test_micro_batches_of_unequal_token_counts_change_nothing(name, aggregation):
    batch = sample(4)
    mask = batch[-1]
    weights = token_weights(mask, aggregation=aggregation)
    info_weights = token_weights(mask, aggregation="token-mean")
    batch = [*batch, np.asarray(weights), np.asarray(info_weights)]
    whole = part_of_loss(0.0, *batch, name=name)
    assert abs(whole[1]) > 1e-3
    for parts in (2, 8):
        micro_batches = zip(*(np.split(x, parts) for x in batch))
        results = [part_of_loss(0.0, *micro_batch, name=name) for micro_batch in micro_batches]
        summed = jax.tree.map(lambda *leaves: sum(leaves), *results)
        chex.assert_trees_all_close(summed, whole, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_aggregation_stands_for_its_weights(name):
    batch = sample(4)
    (expected, _), _ = evaluate(name, *batch, "seq-mean-token-mean")
    weights = token_weights(batch[-1], aggregation="seq-mean-token-mean")
    run = partial(LOSSES[name], *batch, **CLIP, dual_clip=DUAL[name])
    np.testing.assert_allclose(run(aggregation="seq-mean-token-mean")[0], expected, rtol=1e-6)
    # Where both are given, the weights count.
    np.testing.assert_allclose(run(aggregation="token-sum", weights=weights)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_new_logprobs_get_a_gradient(name):
    logprobs, old, advantages, mask = sample(5)

    def loss(x, old, advantages, weights):
        return POLICY_LOSSES[name](x, old, advantages, mask, **CLIP, dual_clip=None, weights=weights)[0]

    grads = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(logprobs, old, advantages, jnp.ones(mask.shape))
    assert [bool(np.any(np.asarray(g) != 0)) for g in grads] == [True, False, False, False]


@pytest.mark.parametrize(
    ("name", "packed"), [("ppo", False), ("gspo", False), ("gspo", True), ("cispo", False)]
)
def test_masked_slots_harm_neither_value_nor_gradient(name, packed):
    *arrays, mask = sample(10)
    weights = np.asarray(token_weights(mask, aggregation="seq-mean-token-mean"))
    dirty, dirty_weights = [x.copy() for x in arrays], weights.copy()
    for x, bad in zip([*dirty, dirty_weights], [np.nan, np.inf, -np.inf, np.nan]):
        x[~mask] = bad
    segment_ids = np.tile([1, 1, 1, 2, 2, 0], (8, 1)) if packed else None
    expected = evaluate(name, *arrays, mask, weights, info_weights=weights, segment_ids=segment_ids)
    actual = evaluate(name, *dirty, mask, dirty_weights, info_weights=dirty_weights, segment_ids=segment_ids)
    chex.assert_trees_all_equal(actual, expected)
    assert np.all(np.asarray(actual[1])[~mask] == 0)


@pytest.mark.parametrize(
    ("name", "packed"), [("ppo", False), ("gspo", False), ("gspo", True), ("cispo", False)]
)
def test_an_all_masked_batch_is_zero_in_loss_gradient_and_info(name, packed):
    bad, mask = np.full((8, 6), np.nan, np.float32), np.zeros((8, 6), bool)
    segment_ids = np.zeros((8, 6), int) if packed else None
    for leaf in jax.tree.leaves(evaluate(name, bad, bad, bad, mask, "token-mean", segment_ids=segment_ids)):
        assert np.all(leaf == 0)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_vmap(name):
    *arrays, mask = sample(11)
    run = partial(POLICY_LOSSES[name], **CLIP, dual_clip=None, aggregation="token-sum")
    mapped, _ = jax.jit(jax.vmap(run))(*arrays, mask)
    (whole, _), _ = evaluate(name, *arrays, mask, "token-sum", dual_clip=None)
    np.testing.assert_allclose(jnp.sum(mapped), whole, rtol=1e-5)
    assert mapped[1] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_bad_input_is_named(name):
    caller = POLICY_LOSSES[name].__name__
    x, mask, run = np.zeros((2, 3)), np.ones((2, 3)), partial(POLICY_LOSSES[name], dual_clip=None)
    mode = {"aggregation": "token-mean"}
    with pytest.raises(ValueError, match=r"aggregation: .*'token-mean'.*got 'tokenmean'"):
        run(x, x, x, mask, **CLIP, aggregation="tokenmean")
    with pytest.raises(ValueError, match=rf"{caller}: expected aggregation, one of .*, or weights"):
        run(x, x, x, mask, **CLIP)
    with pytest.raises(ValueError, match=rf"{caller}: expected weights .*\[2, 3\], got \[2, 4\]"):
        run(x, x, x, mask, **CLIP, weights=np.zeros((2, 4)))
    with pytest.raises(ValueError, match=rf"{caller}: expected advantages .*\[2, 3\], got \[3\]"):
        run(x, x, np.zeros(3), mask, **CLIP, **mode)
    for low, high in ((-0.2, 0.2), (1.1, 0.2), (0.2, -0.1)):
        with pytest.raises(
            ValueError, match=rf"{caller}: expected clip_low in \[0, 1\].* got {low} and {high}"
        ):
            run(x, x, x, mask, clip_low=low, clip_high=high, **mode)
    message = "dual_clip None, got 1.0" if name == "cispo" else "dual_clip above 1 or None, got 1.0"
    with pytest.raises(ValueError, match=f"{caller}: expected {message}"):
        POLICY_LOSSES[name](x, x, x, mask, **CLIP, dual_clip=1.0, **mode)


def test_segment_ids_of_another_shape_are_named():
    x = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"gspo_loss: expected segment_ids .*\[2, 3\], got \[3\]"):
        policy.gspo_loss(x, x, x, x, **CLIP, dual_clip=None, aggregation="token-mean", segment_ids=[1, 1, 1])


def test_numpy_arrays_and_lists_outside_jit():
    loss, info = policy.policy_loss(
        np.log([[1.5]]), [[0]], [[1]], [[1]], **CLIP, dual_clip=3.0, aggregation="token-mean"
    )
    assert float(loss) == pytest.approx(-1.28)
    assert info["pg_clipfrac"] == 1
