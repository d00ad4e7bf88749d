"""The kernels of attention: which is chosen, what is compiled for TPU and GPU, that packed rows agree.

The blocked form against a loop over positions is in test_models_decoder.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.experimental.pallas.ops.tpu import splash_attention as splash_kernels
from tiny_networks import assert_trees_close, random_params, random_tokens, tiny_config
from tiny_run import write_config

from vcppo_jax.config_load import ConfigError, load_config
from vcppo_jax.models import attention as module
from vcppo_jax.models.attention import attention, check_platform, segment_table
from vcppo_jax.models.config import model_config
from vcppo_jax.models.decoder import hidden_states
from vcppo_jax.phases import workspace
from vcppo_jax.sharding import context_device, make_mesh


def inputs(batch, length, heads, kv_heads, width, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def packed_ids(*rows):
    """Segment ids 1, 2, ... of the lengths of each row, then 0 as far as the longest row."""
    length = max(map(sum, rows))
    ids = [np.repeat([*range(1, len(row) + 1), 0], [*row, length - sum(row)]) for row in rows]
    return jnp.asarray(np.stack(ids), jnp.int32)


def output_and_gradients(arrays, segment_ids, implementation):
    """The attention, and the gradients of a weighted sum of it, in one program."""

    def total(arrays, segment_ids):
        out = attention(*arrays, segment_ids, implementation=implementation).astype(jnp.float32)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays, segment_ids)
    return out, gradients


# Splash attention, on TPU.


def test_splash_equals_blocked_on_packed_rows(monkeypatch):
    monkeypatch.setattr(module, "SPLASH_BLOCK", 128)
    interpreted = functools.partial(splash_kernels.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_kernels, "make_splash_mha", interpreted)
    # Not a multiple of the block; a segment that crosses it; two query heads to a kv head.
    arrays, segment_ids = inputs(2, 150, 2, 1, 8), packed_ids((60, 80), (150,))
    out, gradients = output_and_gradients(arrays, segment_ids, "splash")
    expected, expected_gradients = output_and_gradients(arrays, segment_ids, "blocked")
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert_trees_close(gradients, expected_gradients, atol=1e-5)


def shapes_in(program):
    """The shape of each tensor in a lowered program."""
    return {tuple(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<([\dx]+x)\w+>", program)}


def lowered(platform, implementation, length, *, packed):
    arrays = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    segment_ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if packed else None

    def total(arrays, segment_ids):
        return jnp.sum(attention(*arrays, segment_ids, implementation=implementation).astype(jnp.float32))

    traced = jax.jit(jax.grad(total)).trace(arrays, segment_ids)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def square(program, length):
    return [shape for shape in shapes_in(program) if sum(size >= length for size in shape) > 1]


@pytest.mark.parametrize("packed", [False, True])
def test_splash_compiles_to_three_kernels_and_no_square(packed):
    program = lowered("tpu", "splash", 2048, packed=packed)
    assert program.count("tpu_custom_call") == 3
    assert square(program, 2048) == []
    assert square(lowered("tpu", "blocked", 128, packed=packed), 128)  # a row of one block is a square


# cuDNN, on NVIDIA GPUs.


@pytest.fixture
def hopper(monkeypatch):
    """As if cuDNN and a GPU that computes packed rows were here: enough to lower, not to run."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 90800)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)


@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_compiles_to_fused_calls_and_no_square(hopper, packed):
    program = lowered("cuda", "cudnn", 2048, packed=packed)
    assert "@__cudnn$fmhaSoftmax(" in program
    assert "__cudnn$fmhaSoftmaxBackward" in program
    assert ("PADDING_CAUSAL" in program) == packed
    assert square(program, 2048) == []


def ragged_attention(query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """What JAX documents of cuDNN's packed rows, by the plain form; nothing where no segment is."""
    assert mask_type == fused.MaskType.PADDING_CAUSAL
    assert scale == query.shape[-1] ** -0.5
    assert q_seqlen is kv_seqlen
    assert q_offsets is kv_offsets
    assert q_offsets.shape[1] == q_seqlen.shape[1] + 1
    first, last = q_offsets[:, :-1, None], (q_offsets[:, :-1] + q_seqlen)[:, :, None]
    positions = jnp.arange(query.shape[1])
    inside = (positions >= first) & (positions < last) & (q_seqlen > 0)[:, :, None]
    segment_ids = jnp.argmax(inside, axis=1)
    out = module.blocked(query, key, value, segment_ids)
    return jnp.where(inside.any(axis=1)[:, :, None, None], out, jnp.nan)


# With 8 tokens to a segment a row of 40 may have 5; the padding counts as one.
ROWS = {
    "fits": ((7, 13, 10), (40,), (1, 1, 1, 1, 36), (9, 9, 9, 9)),
    "too many segments": ((7, 13, 10), (40,), (5, 5, 5, 5, 5, 5), (9, 9)),
}


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        (None, "fits"),
        ({"fsdp": 2, "tensor": 4}, "fits"),
        ({"fsdp": 2, "tensor": 4}, "too many segments"),
        ({"fsdp": 2, "sequence": 4}, "fits"),
    ],
    ids=str,
)
def test_packed_rows_reach_cudnn_as_offsets_and_lengths(monkeypatch, rows, mesh):
    monkeypatch.setattr(module, "CUDNN_TOKENS_PER_SEGMENT", 8)
    calls = []

    def spy(query, *rest, **options):
        calls.append(query.shape)
        return ragged_attention(query, *rest, **options)

    monkeypatch.setattr(fused, "dot_product_attention", spy)
    # Two kv heads for four parts of the heads: each part gets a copy.
    arrays, segment_ids = inputs(4, 40, 8, 2, 8, "bfloat16"), packed_ids(*ROWS[rows])
    expected, expected_gradients = output_and_gradients(arrays, segment_ids, "blocked")
    with jax.set_mesh(make_mesh(mesh or {}, jax.devices()[: 8 if mesh else 1])):
        out, gradients = output_and_gradients(arrays, segment_ids, "cudnn")
    assert set(calls) == {(2, 40, 2, 8) if mesh else (4, 40, 8, 8)}
    np.testing.assert_allclose(out, expected, atol=0.02)
    as_float = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    assert_trees_close(as_float(gradients), as_float(expected_gradients), atol=0.1)


@pytest.mark.parametrize("length", [40, 42], ids="length {}".format)
def test_heads_that_the_parts_of_a_row_do_not_divide_are_filled_up(length):
    # Six heads for four parts; a length of 42 has no four equal parts and stays whole.
    arrays, segment_ids = inputs(2, length, 6, 2, 8), packed_ids((17, 23), (length,))
    expected, expected_gradients = output_and_gradients(arrays, segment_ids, "blocked")
    with jax.set_mesh(make_mesh({"sequence": 4}, jax.devices()[:4])):
        out, gradients = output_and_gradients(arrays, segment_ids, "blocked")
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert_trees_close(gradients, expected_gradients, atol=1e-5)


def test_cudnn_refuses_float32():
    with pytest.raises(ValueError, match=r"model.attention=cudnn .*16 bits, got float32: set model.compute_"):
        attention(*inputs(1, 4, 2, 1, 8), None, implementation="cudnn")


def test_segment_table_lists_the_runs_of_each_row():
    ids = jnp.array([[5, 5, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 4, 4, 5]])
    offsets, lengths, counts = segment_table(ids, 3)
    assert counts.tolist() == [3, 1, 5]
    assert offsets.tolist() == [[0, 2, 5, -1], [0, -1, -1, -1], [0, 1, 2, -1]]
    assert lengths.tolist() == [[2, 3, 2], [7, -1, -1], [1, 1, 2]]


# The blocked form.


def test_queries_read_no_keys_of_later_quarters():
    query, key, value = inputs(1, 80, 1, 1, 4)
    program = str(jax.make_jaxpr(functools.partial(module.blocked, block=10))(query, key, value, None))
    scores = set(re.findall(r"f32\[1,1,1,10,(\d\d)\]", program))
    assert scores == {"20", "40", "60", "80"}


# The choice.

KINDS = {"tpu": "TPU v5", "cpu": "cpu", "gpu": "NVIDIA H100 80GB HBM3", "rocm": "AMD Instinct MI300X"}


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "chosen"),
    [
        ("tpu", "bfloat16", 128, "splash"),
        ("tpu", "float32", 64, "splash"),
        ("gpu", "bfloat16", 128, "cudnn"),
        ("gpu", "float16", 64, "cudnn"),
        ("gpu", "float32", 128, "blocked"),
        ("gpu", "bfloat16", 256, "blocked"),
        ("gpu", "bfloat16", 36, "blocked"),
        ("rocm", "bfloat16", 128, "blocked"),
        ("cpu", "bfloat16", 128, "blocked"),
    ],
)
def test_auto_takes_what_the_platform_has(monkeypatch, kind, dtype, width, chosen):
    device = SimpleNamespace(platform=kind.replace("rocm", "gpu"), device_kind=KINDS[kind])
    monkeypatch.setattr(module, "context_device", lambda: device)
    assert module.choose(jax.ShapeDtypeStruct((1, 8, 2, width), dtype), packed=True) == chosen


@pytest.mark.parametrize(("capability", "packed_choice"), [("8.0", "blocked"), ("9.0", "cudnn")])
def test_packed_rows_need_hopper(monkeypatch, capability, packed_choice):
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA", compute_capability=capability)
    monkeypatch.setattr(module, "context_device", lambda: device)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    query = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    assert module.choose(query, packed=True) == packed_choice
    assert module.choose(query, packed=False) == "cudnn"


def test_the_platform_is_that_of_the_mesh_in_context():
    assert context_device().platform == jax.default_backend()
    device = jax.sharding.AbstractDevice(device_kind="TPU v5", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert context_device() == device
        assert module.choose(jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16), packed=True) == "splash"


@pytest.mark.parametrize("name", ["blocked", "spied"])
def test_the_decoder_takes_the_configured_one(monkeypatch, name):
    calls = []

    def spied(query, key, value, segment_ids):
        calls.append(query.shape)
        return module.blocked(query, key, value, segment_ids)

    config = dataclasses.replace(tiny_config("qwen2"), attention=name)
    monkeypatch.setitem(module.IMPLEMENTATIONS, "spied", spied)
    jax.eval_shape(lambda params: hidden_states(params, config, random_tokens(1, 6)), random_params(config))
    assert len(calls) == (name == "spied")


def test_the_key_reaches_the_model_and_must_run_here(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "init_params", lambda *arguments, **layout: {})
    file = write_config(tmp_path)
    run = workspace.Workspace(load_config(file, ["model.attention=blocked"]))
    assert run.base_policy().config.attention == "blocked"
    with pytest.raises(ConfigError, match=r"model.attention=cudnn computes in 16 bits, got compute_dtype=f"):
        load_config(file, ["model.attention=cudnn"])
    with pytest.raises(ValueError, match=r"model.attention=splash runs on tpu, the devices here are cpu"):
        workspace.Workspace(load_config(file, ["model.attention=splash"]))
    with pytest.raises(ValueError, match=r"attention: expected one of auto, blocked, .* got 'flash'"):
        model_config({}, attention="flash")


def test_other_names_and_platforms_are_refused():
    with pytest.raises(ValueError, match=r"model.attention: expected auto or one of blocked, .*got 'flash'"):
        attention(*inputs(1, 4, 2, 1, 8), None, implementation="flash")
    with pytest.raises(ValueError, match=r"model.attention=splash runs on tpu, the devices here are cpu"):
        check_platform("splash", "cpu")
    check_platform("auto", "cpu")
    check_platform("cudnn", "gpu")


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a TPU, or an NVIDIA GPU of Hopper or newer")
def test_the_kernel_of_this_machine_equals_blocked_on_packed_rows():
    arrays = inputs(2, 1024, 8, 2, 64, "bfloat16")
    segment_ids = packed_ids((300, 1, 400, 200), (1024,))
    assert module.choose(arrays[0], packed=True) != "blocked"
    for ids in (segment_ids, None):
        out, gradients = output_and_gradients(arrays, ids, "auto")
        expected, expected_gradients = output_and_gradients(arrays, ids, "blocked")
        np.testing.assert_allclose(out, expected, atol=0.02)
        assert_trees_close(gradients, expected_gradients, atol=0.1)
