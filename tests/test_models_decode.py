"""Decoding with a cache equals the full forward pass, at every step and in rows of different lengths."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import random_params, random_tokens, tiny_config

from vcppo_jax.models.decode import decode_step, prefill
from vcppo_jax.models.decoder import hidden_states
from vcppo_jax.models.heads import logits
from vcppo_jax.models.specs import param_shardings, weight_specs
from vcppo_jax.rollout.programs import decode_weights
from vcppo_jax.sharding import make_mesh

PROMPT, STEPS, CACHE = 6, 4, 12
LENGTHS = np.array([2, 6, 1, 5], np.int32)
TOKENS = random_tokens(4, PROMPT + STEPS)
"""Row i's prompt is its first LENGTHS[i] tokens; the next STEPS are then decoded."""


def right_padded(padding: int) -> np.ndarray:
    return np.where(np.arange(PROMPT) < LENGTHS[:, None], TOKENS[:, :PROMPT], padding)


@partial(jax.jit, static_argnums=2)
def prefill_and_decode(params, prompts, config):
    weights = decode_weights(params, config)
    hidden, cache = prefill(weights, config, prompts, LENGTHS, cache_size=CACHE)

    def step(cache, tokens):
        hidden, cache = decode_step(weights, config, tokens, cache)
        return cache, hidden

    steps = jnp.stack([TOKENS[np.arange(4), LENGTHS + i] for i in range(STEPS)])
    cache, rest = jax.lax.scan(step, cache, steps)
    return jnp.concatenate([hidden[None], rest]), cache.lengths


def decode_all(params, config, padding: int = 0) -> np.ndarray:
    """[STEPS + 1, B, D]: the state after the prompt, then after each decoded token."""
    hidden, lengths = prefill_and_decode(params, right_padded(padding), config)
    np.testing.assert_array_equal(lengths, LENGTHS + STEPS)
    return np.asarray(hidden.astype(jnp.float32))


compiled_hidden_states = jax.jit(hidden_states, static_argnums=1)


def full_forward(params, config) -> np.ndarray:
    states = compiled_hidden_states(params, config, TOKENS)
    at = LENGTHS[None] - 1 + np.arange(STEPS + 1)[:, None]
    return np.asarray(states.astype(jnp.float32))[np.arange(4)[None], at]


@pytest.mark.parametrize("case", ["llama_llama3", "llama_biases", "qwen2", "qwen3"])
def test_every_step_equals_the_full_forward_pass(case):
    config = tiny_config(case)
    params = random_params(config)
    ours, expected = decode_all(params, config), full_forward(params, config)
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    weights = decode_weights(params, config)
    np.testing.assert_allclose(
        logits(weights, config, jnp.asarray(ours[-1])), logits(params, config, expected[-1]), atol=1e-3
    )


def test_padding_of_the_prompts_is_never_read():
    config = tiny_config("qwen2")
    params = random_params(config)
    np.testing.assert_array_equal(decode_all(params, config), decode_all(params, config, padding=63))


def test_bfloat16_decodes_close_to_float32():
    wide = tiny_config("qwen3")
    config = dataclasses.replace(wide, compute_dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf / 2, random_params(wide))
    weights = decode_weights(params, config)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    assert len(weights["layers"]) == config.num_layers
    expected = full_forward(params, wide)
    np.testing.assert_allclose(decode_all(params, config), expected, atol=0.05 * np.abs(expected).max())


def test_a_mesh_gives_the_same_states():
    config = tiny_config("qwen2")
    params = random_params(config)
    expected = decode_all(params, config)
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, jax.devices()[:8])
    spread = jax.device_put(params, param_shardings(weight_specs(config, head="lm"), mesh))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(decode_all(spread, config), expected, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen2", "llama_biases"])
def test_int8_weights_are_rounded_by_half_a_step_and_decode_close_by(case):
    config = tiny_config(case)
    params = jax.tree.map(lambda leaf: leaf / 2, random_params(config))
    exact, rounded = decode_weights(params, config), decode_weights(params, config, int8=True)
    for name, weights in rounded["layers"][1].items():
        if isinstance(weights, dict):
            assert weights["transposed"].dtype == jnp.int8
            wide = np.asarray(exact["layers"][1][name]["transposed"]).T
            scale = np.asarray(weights["scale"])
            np.testing.assert_allclose(scale, np.abs(wide).max(axis=0) / 127, rtol=1e-6)
            error = np.abs(wide - np.asarray(weights["transposed"], np.float32).T * scale)
            assert (error <= 0.5001 * scale).all()
        else:
            np.testing.assert_array_equal(weights, exact["layers"][1][name])

    @jax.jit
    def last(weights):
        hidden, cache = prefill(weights, config, right_padded(0), LENGTHS, cache_size=CACHE)
        return hidden, decode_step(weights, config, TOKENS[np.arange(4), LENGTHS], cache)[0]

    for ours, expected in zip(last(rounded), last(exact)):
        assert 0 < np.abs(ours - expected).max() < 0.1 * np.abs(expected).max()
