"""Sampling rules against exact probabilities, a NumPy loop and transformers' own warpers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vcppo_jax.rollout.sampling import (
    Sampling,
    choose_token,
    filter_weights,
    sample_keys,
    sample_token,
    token_uniforms,
)

draw = jax.jit(sample_token, static_argnums=2)
choose = jax.jit(choose_token, static_argnums=2)
keys_of = jax.jit(sample_keys)


def sampling(**kwargs) -> Sampling:
    return Sampling(max_new_tokens=4, **kwargs)


def kept(scaled: np.ndarray, rules: Sampling) -> np.ndarray:
    scaled = np.asarray(scaled, np.float32)
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return np.asarray(jax.jit(filter_weights, static_argnums=2)(scaled, weights, rules)) > 0


def kept_by_loop(row: np.ndarray, rules: Sampling) -> np.ndarray:
    """The rules as sentences, one row, float64."""
    p = np.exp(row - row.max())
    keep = np.ones(len(row), bool)
    if rules.top_k:
        kth = np.sort(row)[::-1][min(rules.top_k, len(row)) - 1]
        keep &= row >= kth
    if rules.top_p < 1:
        q = np.where(keep, p, 0) / p[keep].sum()
        keep &= np.array([q[row > x].sum() < rules.top_p for x in row])
    return keep & (p >= rules.min_p)


@pytest.mark.parametrize(("vocab", "temperature"), [(2, 1.0), (5, 1.0), (37, 0.5)])
def test_frequencies_are_the_softmax(vocab, temperature):
    rows = 20_000
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 1.5
    if vocab > 2:
        logits[[0, vocab - 1]] = -np.inf  # at both ends, where an inverse would overrun
    scaled = np.float64(logits) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    keys = keys_of(jax.random.key(3), jnp.arange(rows))
    tokens, _ = draw(np.tile(logits, (rows, 1)), keys, sampling(temperature=temperature))
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[probs == 0].sum() == 0
    expected = rows * probs[probs > 0]
    freedom = len(expected) - 1
    chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), (counts, expected)


def test_inverse_is_exact_on_a_grid_of_uniforms():
    probs = np.array([0.1, 0.25, 0.0, 0.4, 0.05, 0.2], np.float32)
    grid = (np.arange(200) + 0.5) / 200
    uniforms = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2).astype(np.float32)
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(probs), (len(uniforms), 1))
    tokens, _ = choose(logits, uniforms, sampling())
    np.testing.assert_allclose(np.bincount(tokens, minlength=6) / len(uniforms), probs, atol=0.004)


def test_extreme_uniforms_never_draw_a_token_of_probability_zero():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, 101)).astype(np.float32) * 4
    logits[rng.random(logits.shape) < 0.8] = -np.inf
    logits[np.isinf(logits).all(-1), 50] = 0.0
    for first in (0.0, 1 - 2.0**-23, 1 - 2.0**-24, 1.0):
        for second in (0.0, 1 - 2.0**-24, 1.0):
            tokens, logprobs = choose(logits, np.tile(np.float32([first, second]), (64, 1)), sampling())
            assert np.isfinite(np.take_along_axis(logits, np.asarray(tokens)[:, None], 1)).all()
            assert np.isfinite(logprobs).all()


@pytest.mark.parametrize(
    "rules",
    [
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 0.6},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("ties", [False, True])
def test_filters_keep_exactly_the_set_of_the_loop(rules, ties):
    rows = np.random.default_rng(1).normal(size=(40, 23)).astype(np.float32) * 2
    if ties:
        rows = np.round(rows)  # holds -0.0 and 0.0 too
    expected = np.stack([kept_by_loop(np.float64(row), sampling(**rules)) for row in rows])
    np.testing.assert_array_equal(kept(rows, sampling(**rules)), expected)
    assert expected.any(-1).all()


def test_filters_on_known_probabilities():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    assert kept(logits, sampling(top_p=0.39)).tolist() == [[True, False, False, False]]
    assert kept(logits, sampling(top_p=0.69)).tolist() == [[True, True, False, False]]
    assert kept(logits, sampling(top_p=0.71)).tolist() == [[True, True, True, False]]
    assert kept(logits, sampling(min_p=0.6)).tolist() == [[True, True, False, False]]
    # top-p renormalises after top-k: 0.4 / 0.7 = 0.571.
    assert kept(logits, sampling(top_k=2, top_p=0.56)).tolist() == [[True, False, False, False]]
    assert kept(logits, sampling(top_k=2, top_p=0.58)).tolist() == [[True, True, False, False]]
    # Tokens tied with the last one kept stay.
    assert kept(np.zeros((1, 4)), sampling(top_k=2)).tolist() == [[True] * 4]
    assert kept(np.zeros((1, 4)), sampling(top_p=0.01)).tolist() == [[True] * 4]


@pytest.mark.parametrize("rules", [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}], ids=str)
def test_filters_agree_with_transformers(rules):
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warper = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    (name, value), *_ = rules.items()
    rows = np.random.default_rng(2).normal(size=(50, 64)).astype(np.float32) * 3
    warped = warper[name](value)(None, torch.from_numpy(rows.copy())).numpy()
    np.testing.assert_array_equal(kept(rows, sampling(**rules)), np.isfinite(warped))


def test_draws_stay_inside_the_filters_and_renormalise():
    rows = 4000
    logits = np.tile(np.log(np.float32([0.1, 0.4, 0.2, 0.3])), (rows, 1))
    keys = keys_of(jax.random.key(0), jnp.arange(rows))
    tokens, logprobs = draw(logits, keys, sampling(top_k=2))
    assert set(np.unique(tokens)) == {1, 3}
    assert np.mean(np.asarray(tokens) == 1) == pytest.approx(4 / 7, abs=0.03)
    # The log-prob is over the full vocabulary, before the filter.
    np.testing.assert_allclose(np.exp(logprobs), np.where(np.asarray(tokens) == 1, 0.4, 0.3), rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_logprobs_are_of_the_scaled_softmax(temperature):
    logits = np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32) * 4
    keys = keys_of(jax.random.key(1), jnp.arange(8))
    tokens, logprobs = draw(logits, keys, sampling(temperature=temperature, top_p=0.9))
    full = jax.nn.log_softmax(logits / (temperature or 1.0))
    np.testing.assert_allclose(logprobs, np.take_along_axis(full, tokens[:, None], 1)[:, 0], atol=1e-5)
    if temperature == 0:
        np.testing.assert_array_equal(tokens, jnp.argmax(logits, -1))


def test_greedy_takes_the_lowest_of_tied_tokens_and_bfloat16_logits_are_read_in_float32():
    logits = jnp.asarray([[0.0, 2.0, 2.0, 1.0]], jnp.bfloat16)
    tokens, logprobs = choose(logits, np.zeros((1, 2), np.float32), sampling(temperature=0))
    assert tokens.tolist() == [1]
    assert logprobs.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits.astype(jnp.float32))[:, 1], atol=1e-6)


def test_randomness_belongs_to_the_sample_and_the_token_index():
    key = jax.random.key(5)
    ids, order = np.arange(6), np.asarray([4, 1, 0, 5, 3, 2])
    uniforms = jax.jit(lambda ids, steps: token_uniforms(sample_keys(key, ids), steps))
    whole = np.stack([uniforms(ids, np.full(6, step)) for step in range(7)])
    steps = np.asarray([3, 6, 0, 2, 2, 5])  # each sample is elsewhere
    np.testing.assert_array_equal(uniforms(ids[order], steps), whole[steps, order])
    assert len(np.unique(whole)) == whole.size
    one = jax.random.fold_in(jax.random.fold_in(key, 4), 3)
    logits = np.random.default_rng(0).normal(size=(1, 300)).astype(np.float32)
    np.testing.assert_array_equal(
        draw(logits, one[None], sampling())[0], choose(logits, whole[3, 4:5], sampling())[0]
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.2),
        ("min_p", 1.5),
        ("max_new_tokens", 0),
        ("n", 0),
        ("n", True),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=rf"Sampling\.{field}: expected .*, got {value!r}") as error:
        Sampling(**{"max_new_tokens": 4, field: value})
    assert "\n" not in str(error.value)
    assert hash(Sampling(max_new_tokens=4)) == hash(Sampling(max_new_tokens=4))
