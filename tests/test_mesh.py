"""The mesh: sizes that multiply, slices and their order, layouts of weights, the way from one to another."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import assert_trees_close, random_params, tiny_config

from vcppo_jax import sharding
from vcppo_jax.models.reshard import reshard
from vcppo_jax.models.specs import param_shardings, weight_specs
from vcppo_jax.rollout import programs
from vcppo_jax.sharding import LAYOUTS, make_mesh, rollout_mesh


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices)


def test_slices_are_outermost_on_each_axis():
    first = jax.devices()[0].id
    copies = ids(make_mesh({"fsdp": 2, "tensor": 2, "dcn_data": 2})) - first
    assert copies.reshape(2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Two of data and two of fsdp in each of two slices, over which fsdp goes on.
    mesh = make_mesh({"data": 2, "fsdp": -1, "dcn_fsdp": 2})
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "sequence": 1, "tensor": 1}
    assert (ids(mesh) - first).reshape(2, 4).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def chips(slices, each, platform="tpu"):
    """As many devices as asked for of a platform whose order the mesh looks up."""
    return [
        SimpleNamespace(id=i, platform=platform, slice_index=i // each, process_index=i // 2, device_kind="")
        for i in range(slices * each)
    ]


@pytest.mark.parametrize(
    ("sizes", "devices", "message"),
    [
        ({"fsdp": 3}, None, "data 1 x fsdp 3 x sequence 1 x tensor 1 = 3, but there are 8 devices"),
        ({"fsdp": -1, "tensor": 3}, None, "fsdp -1 x sequence 1 x tensor 3 = 3 x ?, but there are 8 devices"),
        (
            {"fsdp": 2, "sequence": 2, "dcn_data": 4},
            None,
            "data 1 x fsdp 2 x sequence 2 x tensor 1 = 4 in each slice, dcn_data 4 x dcn_fsdp 1 = 4 slices, "
            "16 in all, but there are 8 devices",
        ),
        ({"fsdp": -1}, chips(2, 4), "dcn_data 1 x dcn_fsdp 1 = 1, but the devices are in 2 slices"),
        ({"dcn_data": 8}, chips(2, 4, "gpu"), "dcn_data 8 x dcn_fsdp 1 = 8, but the devices are in 2 slices"),
        ({"fsdp": 0}, None, "sizes are positive, and at most one is -1 (fill); got data=1, fsdp=0"),
        ({"dcn_data": -1, "dcn_fsdp": -1}, None, "at most one is -1 (fill); got dcn_data=-1, dcn_fsdp=-1"),
        (
            {"context": 2},
            None,
            "unknown axes ['context']; the axes are ['data', 'fsdp', 'sequence', 'tensor'",
        ),
    ],
    ids=str,
)
def test_a_wrong_product_is_spelled_out(sizes, devices, message):
    with pytest.raises(ValueError, match="mesh: .*" + re.escape(message)):
        make_mesh(sizes, devices)


@pytest.mark.parametrize(
    ("platform", "sizes", "asked"),
    [
        ("tpu", {"fsdp": -1, "tensor": 2, "dcn_data": -1}, ([1, 2, 1, 2], [2, 1, 1, 1])),
        ("gpu", {"fsdp": -1, "dcn_fsdp": 2}, ([1, 4, 1, 1], [1, 2, 1, 1])),
        ("gpu", {"fsdp": -1, "dcn_data": 4}, ([1, 2, 1, 1], [4, 1, 1, 1])),  # by process
        ("gpu", {"fsdp": -1}, ([1, 8, 1, 1], None)),  # hosts may be one slice
    ],
)
def test_the_hardware_s_own_order_is_asked_for(monkeypatch, platform, sizes, asked):
    seen = []
    tools = SimpleNamespace(
        create_device_mesh=lambda ici, devices, **_: seen.append((ici, None)) or np.asarray(devices),
        create_hybrid_device_mesh=lambda ici, dcn, devices, **_: (
            seen.append((ici, dcn)) or np.asarray(devices)
        ),
    )
    monkeypatch.setattr(sharding, "mesh_utils", tools)
    monkeypatch.setattr(sharding, "Mesh", lambda devices, axes, **_: devices)
    make_mesh(sizes, chips(2, 4, platform))
    assert seen == [asked]


def test_generation_divides_the_same_devices_anew():
    mesh = make_mesh({"data": 2, "fsdp": 2, "sequence": 2})
    assert dict(rollout_mesh(mesh, 4).shape) == {"data": 2, "fsdp": 1, "sequence": 1, "tensor": 4}
    assert dict(rollout_mesh(mesh, None).shape) == {"data": 2, "fsdp": 4, "sequence": 1, "tensor": 1}
    assert ids(rollout_mesh(mesh, 2)).reshape(-1).tolist() == ids(mesh).reshape(-1).tolist()
    message = r"mesh.decode_tensor=8 does not divide fsdp 2 x sequence 2 x tensor 1 = 4"
    with pytest.raises(ValueError, match=message):
        rollout_mesh(mesh, 8)


# Layouts.

CONFIG = tiny_config("qwen2", num_hidden_layers=8)
SPECS = weight_specs(CONFIG, head="lm")


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def held(tree):
    """Bytes on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("layout", "parts"), [("full", 8), ("tensor", 2)])
def test_weights_move_to_another_layout_layer_by_layer(layout, parts):
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    params = jax.device_put(random_params(CONFIG), param_shardings(SPECS, mesh))
    with jax.set_mesh(mesh):
        move = jax.jit(functools.partial(reshard, specs=SPECS, layout=layout, dtype="bfloat16"))
        compiled = move.lower(params).compile()
    moved = compiled(params)
    assert_trees_close(moved, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), atol=0)
    wanted = param_shardings(SPECS, mesh, layout)
    assert all(
        jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), moved, wanted))
    )
    # Norms and biases are whole in every layout.
    assert held(moved) == pytest.approx(size(moved) / parts, rel=0.15)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < held(moved) / 2


def test_the_layouts_of_the_config_are_those_of_the_rules():
    from typing import get_args

    from vcppo_jax.config_mesh import Layout

    assert set(get_args(Layout)) == set(LAYOUTS)


@pytest.mark.parametrize("decode_tensor", [2])
def test_rollout_weights_need_no_second_copy(decode_tensor):
    mesh = make_mesh({"fsdp": 4, "sequence": 2})
    abstract = jax.tree.map(
        lambda spec, to: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=to),
        SPECS,
        param_shardings(SPECS, mesh),
        is_leaf=lambda x: hasattr(x, "hf_name"),
    )
    with jax.set_mesh(rollout_mesh(mesh, decode_tensor)):
        layers, rest = programs.split_layers(abstract)
        one = programs.decode_layer.lower(layers, np.int32(0), CONFIG).compile().memory_analysis()
        other = programs.decode_rest.lower(rest, CONFIG).compile().memory_analysis()
    whole = CONFIG.num_layers * one.output_size_in_bytes + other.output_size_in_bytes
    assert one.temp_size_in_bytes < 2 * one.output_size_in_bytes
    assert max(one.temp_size_in_bytes, other.temp_size_in_bytes) < whole / 2
