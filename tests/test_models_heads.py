"""What is read from the hidden states: log-probs, entropy, logits, values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import assert_trees_close, random_params, random_tokens, tiny_config

from vcppo_jax.models.heads import TOKENS_PER_CHUNK, logits, token_logprobs, token_values
from vcppo_jax.models.networks import ValueModel, values
from vcppo_jax.models.specs import param_shardings, weight_specs
from vcppo_jax.sharding import make_mesh

BATCH, LENGTH = 2, 11


def case_of(name: str):
    config = tiny_config(name)
    params = random_params(config)
    head = {key: params[key] for key in ("embed", "lm_head") if key in params}
    hidden = np.random.default_rng(2).normal(size=(BATCH, LENGTH, config.hidden_size)).astype(np.float32)
    return config, head, hidden, random_tokens(BATCH, LENGTH, seed=3)


def whole(head, config, hidden, targets, temperature):
    """The definition, over [B, L, V]."""
    kernel = head["embed"].T if config.tie_word_embeddings else head["lm_head"]
    scores = jax.nn.log_softmax(jnp.matmul(hidden, kernel, precision="highest") / temperature)
    chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(scores) * scores, axis=-1)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 1), (0.6, 8), (1.5, 1024)])
def test_chunks_equal_log_softmax_with_gradients(name, temperature, chunk):
    config, head, hidden, targets = case_of(name)
    weights = np.random.default_rng(4).normal(size=(2, BATCH, LENGTH)).astype(np.float32)

    def total(function):
        def loss(head, hidden):
            logprobs, entropy = function(head, hidden)
            return jnp.sum(weights[0] * logprobs) + jnp.sum(weights[1] * entropy), (logprobs, entropy)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(head, hidden)

    chunked = total(
        lambda head, hidden: token_logprobs(
            head, config, hidden, targets, temperature=temperature, chunk=chunk
        )
    )
    expected = total(lambda head, hidden: whole(head, config, hidden, targets, temperature))
    assert all(leaf.dtype == jnp.float32 for leaf in chunked[0][1])
    assert chunked[0][1][0].shape == (BATCH, LENGTH)
    assert_trees_close(chunked, expected, atol=1e-4, rtol=1e-4)


def test_temperature_may_be_traced():
    config, head, hidden, targets = case_of("llama")
    traced = jax.jit(lambda t: token_logprobs(head, config, hidden, targets, temperature=t))(0.6)
    assert_trees_close(traced, whole(head, config, hidden, targets, 0.6), atol=1e-4)


def test_a_uniform_distribution_has_the_entropy_log_v():
    config, head, hidden, targets = case_of("llama")
    logprobs, entropy = token_logprobs(head, config, 0 * hidden, targets, temperature=1.0)
    np.testing.assert_allclose(logprobs, -np.log(64), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(64), rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_the_logits_of_all_positions_never_exist(name):
    """Compiled only, at the length and vocabulary of a long run: all logits would take 9.3 GiB."""
    length, vocab = 16_384, 152_064
    config = tiny_config(name, vocab_size=vocab)
    head = {
        key: jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        for key, spec in weight_specs(config, head="lm").items()
        if key in ("embed", "lm_head")
    }
    hidden = jax.ShapeDtypeStruct((1, length, config.hidden_size), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def temporary_bytes(chunk):
        def loss(head, hidden, targets):
            logprobs, entropy = token_logprobs(head, config, hidden, targets, temperature=1.0, chunk=chunk)
            return jnp.sum(logprobs + entropy)

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(head, hidden, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_logits = length * vocab * 4
    # The logits of a chunk, their exponentials, and the gradient of both.
    assert temporary_bytes(TOKENS_PER_CHUNK) < 4.5 * TOKENS_PER_CHUNK * vocab * 4 < all_logits / 3
    assert temporary_bytes(length) >= all_logits


def test_a_tied_head_split_over_the_vocabulary_equals_one_device():
    config = tiny_config("llama_tied")
    embed = random_params(config)["embed"]
    hidden = np.random.default_rng(6).normal(size=(8, 12, config.hidden_size)).astype(np.float32)
    targets = random_tokens(8, 12)

    def loss(embed, hidden):
        head = {"embed": embed}
        logprobs, entropy = token_logprobs(head, config, hidden, targets, temperature=0.7, chunk=32)
        return jnp.mean(logprobs * hidden[..., 0]) + jnp.mean(entropy)

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
    expected = jax.device_get(gradient(embed, hidden))
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, jax.devices()[:8])
    spread = jax.device_put(embed, param_shardings(weight_specs(config, head="lm"), mesh)["embed"])
    assert spread.addressable_shards[0].data.shape == (32, 8)  # of [64, 32]
    with jax.set_mesh(mesh):
        ours = jax.device_get(gradient(spread, hidden))
    assert_trees_close(ours, expected, atol=1e-5)


def test_bfloat16_states_give_float32_log_probs_of_the_same_distribution():
    config, head, hidden, targets = case_of("llama")
    narrow = jnp.asarray(hidden, jnp.bfloat16)
    logprobs, entropy = token_logprobs(head, config, narrow, targets, temperature=1.0)
    exact = whole(head, config, hidden, targets, 1.0)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, exact[0], atol=0.1)
    np.testing.assert_allclose(entropy, exact[1], atol=0.1)
    assert logits(head, config, narrow).dtype == jnp.float32


def test_a_new_value_head_is_zero_and_learns():
    config = tiny_config("qwen2")
    params = random_params(config, head="value", head_bias=True)
    zero = {"kernel": jnp.zeros((32, 1)), "bias": jnp.zeros(1)}
    assert {name: spec.init for name, spec in weight_specs(config, head="value")["score"].items()} == {
        "kernel": "zeros"
    }
    new = ValueModel({**params, "score": zero}, config)
    tokens = random_tokens(2, 6)
    np.testing.assert_array_equal(values(new, tokens), np.zeros((2, 6), np.float32))
    gradient = jax.jit(jax.grad(lambda model: jnp.sum(values(model, tokens) - 1.0)))(new)
    assert np.abs(gradient.params["score"]["kernel"]).max() > 0.01
    np.testing.assert_allclose(gradient.params["score"]["bias"], 12.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_a_product_plus_the_bias_in_float32(dtype):
    rng = np.random.default_rng(5)
    hidden = rng.normal(size=(2, 3, 32)).astype(np.float32)
    kernel = rng.normal(size=(32, 1)).astype(np.float32)
    plain = token_values({"score": {"kernel": kernel}}, jnp.asarray(hidden, dtype))
    assert plain.shape == (2, 3)
    assert plain.dtype == jnp.float32
    np.testing.assert_allclose(plain, (hidden @ kernel)[..., 0], atol=1e-5 if dtype == "float32" else 0.1)
    shifted = token_values(
        {"score": {"kernel": kernel, "bias": jnp.full(1, 0.75)}}, jnp.asarray(hidden, dtype)
    )
    np.testing.assert_allclose(shifted - plain, 0.75, atol=1e-5)
