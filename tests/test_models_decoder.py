"""The decoder and its attention: packing, blocks, remat, meshes, dtypes, the two networks."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import assert_trees_close, random_params, random_tokens, tiny_config

from vcppo_jax.models.attention import attention
from vcppo_jax.models.decoder import hidden_states, segment_positions
from vcppo_jax.models.networks import Policy, ValueModel, logprobs, values
from vcppo_jax.models.specs import param_shardings, weight_specs
from vcppo_jax.sharding import make_mesh, named_sharding


def loss(params, config, tokens, segment_ids=None):
    policy = Policy(params, config)
    return jnp.mean(logprobs(policy, tokens, temperature=0.7, segment_ids=segment_ids))


gradients = jax.jit(jax.value_and_grad(loss), static_argnums=1)


def naive_attention(query, key, value, segment_ids):
    """One position and head at a time."""
    batch, length, heads, width = query.shape
    group = heads // key.shape[2]
    out = np.zeros(query.shape)
    for b, q, n in np.ndindex(batch, length, heads):
        seen = [s for s in range(q + 1) if segment_ids is None or segment_ids[b, s] == segment_ids[b, q]]
        scores = np.array([query[b, q, n] @ key[b, s, n // group] for s in seen]) / np.sqrt(width)
        weights = np.exp(scores - scores.max())
        out[b, q, n] = weights / weights.sum() @ value[b, seen, n // group]
    return out


SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3], [4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0]], np.int32)


def attention_inputs():
    rng = np.random.default_rng(0)
    shapes = [(2, 11, 4, 8), (2, 11, 2, 8), (2, 11, 2, 8)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["plain", "segments"])
@pytest.mark.parametrize("block", [3, 4, 11])
def test_attention_in_blocks_equals_a_loop(block, segment_ids):
    inputs = attention_inputs()
    out = attention(*inputs, segment_ids, block=block)
    np.testing.assert_allclose(out, naive_attention(*inputs, segment_ids), atol=1e-5)


def plain_attention(query, key, value, segment_ids):
    """In one piece, for JAX to differentiate."""
    groups, positions = query.shape[2] // key.shape[2], np.arange(query.shape[1])
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key) * query.shape[-1] ** -0.5
    visible = (positions[:, None] >= positions)[None, None]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(visible, scores, -np.inf), axis=-1)
    return jnp.einsum("bnqk,bknh->bqnh", weights, value)


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["plain", "segments"])
@pytest.mark.parametrize("block", [1, 4, 11])
def test_attention_in_blocks_has_the_gradients_of_the_plain_form(block, segment_ids):
    inputs = attention_inputs()
    weights = np.random.default_rng(1).normal(size=inputs[0].shape).astype(np.float32)

    def gradients(form):
        return jax.jit(jax.grad(lambda inputs: jnp.sum(form(*inputs, segment_ids) * weights)))(inputs)

    expected = gradients(plain_attention)
    assert all(np.abs(leaf).max() > 0.1 for leaf in expected)
    assert_trees_close(gradients(functools.partial(attention, block=block)), expected, atol=1e-5)


def test_attention_in_blocks_never_holds_all_the_scores():
    query = jax.ShapeDtypeStruct((1, 1024, 4, 8), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)

    def total(query, key, block):
        return jnp.sum(attention(query, key, key, None, block=block) ** 2)

    def temporary_bytes(block):
        compiled = jax.jit(jax.grad(total, (0, 1)), static_argnums=2).lower(query, key, block).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_scores = 4 * 4 * 1024 * 1024
    assert temporary_bytes(64) < all_scores / 2
    assert temporary_bytes(1024) >= all_scores


def test_positions_restart_in_each_segment():
    segments = jnp.array([[5, 5, 5, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    positions = segment_positions(jnp.zeros((2, 7), jnp.int32), segments)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert segment_positions(jnp.zeros((1, 3), jnp.int32), None).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("case", ["llama_llama3", "qwen3"])
def test_positions_that_are_given_count(case):
    config = tiny_config(case)
    params, tokens = random_params(config), random_tokens(1, 8)

    @jax.jit
    def run(positions):
        return hidden_states(params, config, tokens, positions=positions)

    plain = run(jnp.arange(8)[None])
    np.testing.assert_allclose(plain, hidden_states(params, config, tokens), atol=1e-5)
    # Rotary positions are relative: a shift changes nothing, a stretch does.
    np.testing.assert_allclose(run(jnp.arange(8)[None] + 5), plain, atol=1e-3)
    assert np.abs(run(jnp.arange(8)[None] * 3) - plain).max() > 1e-2


@pytest.mark.parametrize("case", ["llama_biases", "qwen3"])
def test_packed_rows_equal_separate_rows(case):
    config = tiny_config(case)
    policy = Policy(random_params(config), config)
    value_model = ValueModel(random_params(config, head="value", head_bias=True), config)
    lengths = (5, 1, 7, 3)
    rows = [random_tokens(1, length, seed=length) for length in lengths]
    packed = np.concatenate([*rows, np.zeros((1, 4), np.int32)], axis=1)
    segments = np.repeat([1, 2, 3, 4, 0], [*lengths, 4])[None]
    packed_logprobs = jax.jit(logprobs)(policy, packed, segment_ids=segments)
    packed_values = jax.jit(values)(value_model, packed, segment_ids=segments)
    assert packed_logprobs.shape == (1, 19)
    assert packed_values.shape == (1, 20)
    assert packed_logprobs.dtype == packed_values.dtype == jnp.float32
    assert np.isfinite(packed_logprobs).all()
    assert np.isfinite(packed_values).all()
    # The rows, each alone in a batch row, right-padded to one length.
    padded = np.concatenate([np.pad(row, ((0, 0), (0, 7 - row.shape[1])), constant_values=9) for row in rows])
    row_logprobs, row_values = jax.jit(logprobs)(policy, padded), jax.jit(values)(value_model, padded)
    start = 0
    for i, length in enumerate(lengths):
        np.testing.assert_allclose(
            packed_logprobs[0, start : start + length - 1], row_logprobs[i, : length - 1], atol=1e-5
        )
        np.testing.assert_allclose(
            packed_values[0, start : start + length], row_values[i, :length], atol=1e-5
        )
        start += length


def test_rows_of_padding_are_finite_and_harm_no_gradient():
    config = tiny_config("qwen2")
    params, tokens = random_params(config), random_tokens(2, 9)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def first_row(params, segments):
        rows = logprobs(Policy(params, config), tokens, segment_ids=segments)
        return jnp.mean(rows[0]), rows

    (_, rows), gradient = first_row(params, np.array([[1] * 9, [0] * 9], np.int32))
    assert np.isfinite(rows).all()
    _, expected = first_row(params, np.array([[1] * 9, [2] * 5 + [3] * 4], np.int32))
    assert_trees_close(gradient, expected, atol=1e-6)


def test_remat_changes_no_gradient_and_saves_memory():
    config = tiny_config("qwen3")
    params, tokens = random_params(config), random_tokens(2, 32)
    results, temporary_bytes = {}, {}
    for remat in ("none", "dots", "full"):
        lowered = gradients.lower(params, dataclasses.replace(config, remat=remat), tokens)
        compiled = lowered.compile()
        results[remat] = compiled(params, tokens)
        temporary_bytes[remat] = compiled.memory_analysis().temp_size_in_bytes
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(results["none"][1])) > 0.01
    assert_trees_close(results["full"], results["none"], atol=1e-5)
    assert_trees_close(results["dots"], results["none"], atol=1e-5)
    assert temporary_bytes["full"] < temporary_bytes["dots"] < temporary_bytes["none"]


def test_a_mesh_changes_neither_loss_nor_gradients():
    config = tiny_config("qwen3", attention_bias=True, tie_word_embeddings=False)
    params, tokens = random_params(config), random_tokens(8, 12)
    segments = np.tile(np.repeat([1, 2, 0], [5, 4, 3]), (8, 1))
    expected = gradients(params, config, tokens, segments)
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, jax.devices()[:8])
    shardings = param_shardings(weight_specs(config, head="lm"), mesh)
    spread = jax.device_put(params, shardings)
    batch = [jax.device_put(x, named_sharding(mesh, ("batch", "length"))) for x in (tokens, segments)]
    with jax.set_mesh(mesh):
        ours = gradients(spread, config, *batch)
    assert_trees_close(jax.device_get(ours), jax.device_get(expected), atol=1e-5)


def test_bfloat16_is_close_and_rounds():
    wide = tiny_config("qwen3")
    narrow = dataclasses.replace(wide, compute_dtype="bfloat16")
    params, tokens = jax.tree.map(lambda leaf: leaf / 2, random_params(wide)), random_tokens(4, 16)
    hidden = jax.jit(hidden_states, static_argnums=1)(params, narrow, tokens)
    assert hidden.dtype == jnp.bfloat16
    ours = jax.jit(logprobs)(Policy(params, narrow), tokens)
    exact = jax.jit(logprobs)(Policy(params, wide), tokens)
    assert ours.dtype == jnp.float32
    difference = np.abs(ours - exact)
    assert 1e-5 < difference.max() < 0.2
    grads = jax.eval_shape(partial(jax.grad(loss), config=narrow, tokens=tokens), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("case", ["llama_biases", "qwen2", "qwen3"])
def test_a_token_changes_nothing_before_it(case):
    config = tiny_config(case)
    value_model = ValueModel(random_params(config, head="value"), config)
    tokens = random_tokens(1, 12)
    other = tokens.copy()
    other[0, 7] = (other[0, 7] + 1) % 64
    run = jax.jit(values)
    before, after = run(value_model, tokens), run(value_model, other)
    np.testing.assert_array_equal(before[0, :7], after[0, :7])
    assert (np.abs(before[0, 7:] - after[0, 7:]) > 1e-6).all()


def test_networks_are_arguments_of_jit():
    config = tiny_config("llama")
    policy = Policy(random_params(config), config)
    tokens = random_tokens(2, 6)
    run = jax.jit(lambda policy, tokens: logprobs(policy, tokens))  # with a cache of its own
    plain = run(policy, tokens)
    run(policy.replace(params=random_params(config, seed=1)), tokens)
    assert run._cache_size() == 1  # new weights compile nothing
    run(policy.replace(config=dataclasses.replace(config, rms_norm_eps=1e-3)), tokens)
    assert run._cache_size() == 2
    # Without jit, on a list of lists.
    np.testing.assert_allclose(logprobs(policy, tokens.tolist()), plain, atol=1e-5)
    assert jax.eval_shape(logprobs, policy, tokens.astype(np.int64)).shape == (2, 5)
    assert jax.eval_shape(logprobs, policy, tokens[:, :1]).shape == (2, 0)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan"), np.float32(0)])
def test_refuses_a_temperature_that_is_not_positive(temperature):
    config = tiny_config("llama")
    with pytest.raises(ValueError, match=r"logprobs: temperature: expected a positive number, got"):
        logprobs(Policy(random_params(config), config), random_tokens(1, 4), temperature=temperature)


def test_refuses_shapes_that_do_not_fit():
    config = tiny_config("llama")
    policy = Policy(random_params(config), config)
    with pytest.raises(ValueError, match=r"tokens: expected shape \[B, T\], got \[4\]"):
        logprobs(policy, random_tokens(4))
    with pytest.raises(ValueError, match=r"segment_ids: expected shape \[2, 4\], got \[2, 3\]"):
        logprobs(policy, random_tokens(2, 4), segment_ids=np.ones((2, 3), np.int32))
