"""`vcppo plan`: the counts against small programs whose cost is known; the command on eight CPU devices."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import tiny_config, write_config

from vcppo_jax import cli
from vcppo_jax.aot.chips import chip_of
from vcppo_jax.aot.hlo import device_groups, parse_module, parse_shape
from vcppo_jax.aot.jaxpr_flops import jaxpr_flops
from vcppo_jax.aot.program import Cost, DoesNotFit, _does_not_fit, bytes_per_chip, compile_program, links
from vcppo_jax.aot.topology import Topology, TopologyError, topology
from vcppo_jax.aot.traffic import traffic
from vcppo_jax.config_load import dump_config, load_config
from vcppo_jax.models.flops import forward_flops
from vcppo_jax.phases import plan_search
from vcppo_jax.phases.plan import Lengths, ProgramPlan, RunPlan, StepPrograms, network_configs
from vcppo_jax.phases.plan_report import plan_json, plan_page, step_times
from vcppo_jax.phases.plan_search import meshes
from vcppo_jax.sharding import batch_shards, make_mesh, named_sharding

GIB = 2**30


def on_eight(function, *shapes, axes=("embed", "mlp"), **options):
    """(cost, results) of a function of arrays with these shapes, their axes split over eight devices."""
    top = topology("cpu:8")
    mesh = make_mesh({"fsdp": 8}, top.devices)
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=named_sharding(mesh, axes, s)) for s in shapes]
    with jax.set_mesh(mesh):
        compiled = compile_program(jax.jit(function).trace(*arrays), top, mesh, **options)
    return compiled.cost, compiled.results


def test_loops_count_as_often_as_they_run():
    """Five turns of a scan around a product [16, 64] x [64, 64], and three of a loop of unknown length."""

    def program(x, turns):
        def body(x, _):
            return x @ jnp.ones((64, 64)), None

        scanned = jax.lax.scan(body, x, None, length=5)[0]
        return jax.lax.fori_loop(0, turns, lambda _, x: x @ jnp.ones((64, 64)), scanned)

    traced = jax.jit(program).trace(jnp.ones((16, 64)), jnp.int32(3))
    product = 2 * 16 * 64 * 64
    assert jaxpr_flops(traced.jaxpr, unknown_trips=3).total == 8 * product
    module = parse_module(traced.lower().compile().as_text())
    assert traffic(module, devices=1, unknown_trips=3).flops == 8 * product


def test_a_gradient_with_remat_counts_the_recomputation():
    def loss(x, w):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w))(x))

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(jnp.ones((8, 16)), jnp.ones((16, 16)))
    # Once more in the backward pass (XLA needs no first pass here, but JAX traces it), and two gradients.
    assert jaxpr_flops(traced.jaxpr, unknown_trips=1).total == 4 * 2 * 8 * 16 * 16


def test_collectives_and_bytes_of_a_gathered_product():
    """x [512, 256] whole on each device, w [256, 128] split over its rows: a product of parts, reduced."""
    cost, results = on_eight(lambda x, w: x @ w, (512, 256), (256, 128), axes=("embed", None))
    whole = 2 * 512 * 256 * 128
    assert cost.total_flops == whole
    assert cost.flops * 8 == pytest.approx(whole)
    (gather,) = cost.transfers
    assert (gather.kind, gather.devices, gather.calls) == ("all-gather", 8, 1)
    assert gather.payload_bytes == 256 * 128 * 4
    assert gather.seconds == pytest.approx(7 / 8 * 256 * 128 * 4 / 1e9)  # the stand-in's link: 1 GB/s
    assert cost.argument_bytes == (512 * 256 + 256 * 128) * 4 / 8
    read_and_written = cost.argument_bytes + 512 * 128 * 4 / 8
    assert read_and_written <= cost.memory_bytes <= 4 * read_and_written + 4 * gather.payload_bytes
    assert bytes_per_chip(results) == 512 * 128 * 4 / 8


def test_repeated_work_shows():
    """Two rows do not split over eight devices: each computes both."""
    cost, _ = on_eight(lambda x, w: x @ w, (2, 64), (64, 64), axes=(None, None))
    assert cost.flops == cost.total_flops == 2 * 2 * 64 * 64


def test_an_update_in_place_counts_the_part():
    def program(x, at):
        return jax.lax.fori_loop(0, 10, lambda i, x: x.at[at + i].set(1.0), x)

    text = jax.jit(program, donate_argnums=0).lower(jnp.ones((4096, 256)), jnp.int32(0)).compile().as_text()
    counted = traffic(parse_module(text), devices=1, unknown_trips=1).bytes
    assert 10 * 256 * 4 <= counted < 4096 * 256 * 4


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,4]<=[8], x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}, x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("source_target_pairs={{0,1},{1,0}}, x", [[0, 1], [1, 0]]),
        ("channel_id=1", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_groups_of_devices(attributes, groups):
    assert device_groups(attributes, 8) == groups


def test_shapes_and_the_memory_of_a_core():
    hbm, vmem = parse_shape("(bf16[4,512]{1,0:T(4,128)(2,1)}, f32[64]{0:T(128)S(1)})")
    assert (hbm.dims, hbm.size, hbm.on_chip) == ((4, 512), 4096, False)
    assert (vmem.size, vmem.on_chip) == (256, True)


TPU_TEXT = """HloModule jit_f, is_scheduled=true

%body.1 (p.1: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p.1 = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %x.1 = f32[8,16]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %w.1 = f32[16,16]{1,0:T(8,128)S(1)} constant({...})
  %y.1 = f32[8,16]{1,0:T(8,128)} convolution(%x.1, %w.1), dim_labels=bf_io->bf
  ROOT %t.1 = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) tuple(%i.1, %y.1)
}

%condition.1 (p.2: (s32[], f32[8,16])) -> pred[] {
  %c.2 = s32[]{:T(128)} constant(7)
  %p.2 = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  ROOT %lt.2 = pred[]{:T(512)} compare(%i.2, %c.2), direction=LT
}

ENTRY %main.3 (a.3: f32[8,16]) -> f32[8,16] {
  %a.3 = f32[8,16]{1,0:T(8,128)} parameter(0)
  %z.3 = s32[]{:T(128)} constant(0)
  %t.3 = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) tuple(%z.3, %a.3)
  %l.3 = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) while(%t.3), condition=%condition.1, body=%body.1
  ROOT %r.3 = f32[8,16]{1,0:T(8,128)} get-tuple-element(%l.3), index=1
}
"""


def test_a_tpu_module_without_trip_counts():
    """The condition says how often; what lies in the core's memory costs no bandwidth."""
    work = traffic(parse_module(TPU_TEXT), devices=1, unknown_trips=1)
    assert work.flops == 7 * 2 * 8 * 16 * 16
    assert work.bytes == 7 * (2 * 8 * 16 * 4 + 4 + 4 + 1)  # the condition reads two numbers


TPU_CACHE_TEXT = """HloModule jit_f, is_scheduled=true

%scatter.1 (k.1: f32[64,128], i.1: s32[2,1], u.1: f32[2,128]) -> f32[64,128] {
  %k.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %i.1 = s32[2,1]{1,0:T(8,128)} parameter(1)
  %u.1 = f32[2,128]{1,0:T(8,128)} parameter(2)
  ROOT %s.1 = f32[64,128]{1,0:T(8,128)} scatter(%k.1, %i.1, %u.1), update_window_dims={1}
}

ENTRY %main.3 (k.3: f32[64,128], i.3: s32[2,1], u.3: f32[2,128]) -> f32[64,128] {
  %k.3 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %i.3 = s32[2,1]{1,0:T(8,128)} parameter(1)
  %u.3 = f32[2,128]{1,0:T(8,128)} parameter(2)
  %f.3 = f32[64,128]{1,0:T(8,128)} fusion(%k.3, %i.3, %u.3), kind=kCustom, calls=%scatter.1
  %p.3 = ((f32[64,128]{1,0:T(8,128)}), f32[16,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%f.3)
  %d.3 = f32[16,128]{1,0:T(8,128)S(1)} slice-done(%p.3)
  ROOT %b.3 = f32[64,128]{1,0:T(8,128)} bitcast(%f.3)
}
"""


def test_a_scatter_in_place_and_a_slice_into_a_core_count_their_parts():
    """Two rows are read and written, 16 of them go into the core's memory; the 64 are never read whole."""
    expected = 2 * 2 * 128 * 4 + 2 * 4 + 16 * 128 * 4
    assert traffic(parse_module(TPU_CACHE_TEXT), devices=1, unknown_trips=1).bytes == expected
    # As the compiler dumps it, which is not how `as_text` spells it.
    dumped = TPU_CACHE_TEXT.replace("slice-start(%f.3)", "async-start(%f.3), calls=%async.1").replace(
        "ENTRY",
        """%async.1 (a.1: f32[64,128]) -> f32[16,128] {
  %a.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  ROOT %c.1 = f32[16,128]{1,0:T(8,128)S(1)} slice(%a.1), slice={[0:16], [0:128]}
}

ENTRY""",
    )
    assert traffic(parse_module(dumped), devices=1, unknown_trips=1).bytes == expected


TPU_GATHER_TEXT = """HloModule jit_f, is_scheduled=true

%async_collective_fusion.1 (p.1: f32[8,128], w.1: f32[64,128]) -> (f32[64,128], f32[8,128]) {
  %p.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %w.1 = f32[64,128]{1,0:T(8,128)} parameter(1)
  %g.1 = f32[64,128]{1,0:T(8,128)} all-gather(%p.1), channel_id=5, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %t.1 = (f32[64,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) tuple(%g.1, %w.1)
}

ENTRY %main.3 (p.3: f32[8,128], w.3: f32[64,128]) -> f32[64,128] {
  %p.3 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %w.3 = f32[64,128]{1,0:T(8,128)} parameter(1)
  %f.3 = (f32[64,128], f32[64,128]) fusion(%p.3, %w.3), kind=kCustom, calls=%async_collective_fusion.1
  %g.3 = (f32[64,128], f32[64,128]) fusion(%p.3, %w.3), kind=kCustom, calls=%async_collective_fusion.1
  ROOT %r.3 = f32[64,128]{1,0:T(8,128)} get-tuple-element(%g.3), index=0
}
"""


def test_a_collective_that_fusions_carry_on_counts_once():
    """Two fusions with one channel gather 64 rows of 512 bytes; what they hand on moves nothing."""
    work = traffic(parse_module(TPU_GATHER_TEXT), devices=8, unknown_trips=1)
    (gather,) = work.collectives.values()
    assert (gather.calls, gather.payload) == (1, 64 * 512)
    assert work.bytes == 2 * 8 * 512 + 64 * 512  # each reads its part


def test_a_tpu_loop_that_carries_its_limit_and_counts_by_two():
    """From 1 to 8 by 2: four turns, not the seven of a constant limit."""
    carried = TPU_TEXT.replace(
        "%c.2 = s32[]{:T(128)} constant(7)", "%c.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=1"
    )
    carried = carried.replace(
        "%z.3 = s32[]{:T(128)} constant(0)",
        "%z.3 = s32[]{:T(128)} constant(1)\n  %e.3 = s32[]{:T(128)} constant(8)",
    )
    carried = carried.replace("tuple(%z.3, %a.3)", "tuple(%z.3, %e.3)")
    carried = carried.replace("tuple(%i.1, %y.1)", "tuple(%n.1, %y.1)").replace(
        "  ROOT %t.1", "  %two.1 = s32[] constant(2)\n  %n.1 = s32[] add(%i.1, %two.1)\n  ROOT %t.1"
    )
    work = traffic(parse_module(carried), devices=1, unknown_trips=1)
    assert work.flops == 4 * 2 * 8 * 16 * 16


def test_an_unknown_loop_inside_a_loop_runs_once():
    """The outer one has the program's number of turns; a count for both would be their product."""

    def program(x, turns):
        def outer(_, x):
            return jax.lax.while_loop(lambda x: jnp.sum(x) < 0, lambda x: x @ jnp.ones((64, 64)), x)

        return jax.lax.fori_loop(0, turns, outer, x)

    text = jax.jit(program).lower(jnp.ones((16, 64)), jnp.int32(3)).compile().as_text()
    assert traffic(parse_module(text), devices=1, unknown_trips=3).flops == 3 * 2 * 16 * 64 * 64


def test_links_of_a_torus_and_of_hosts():
    v5p = Topology("v5p:4x4x4", (), chip_of("TPU v5p"), (4, 4, 4))
    ring = [(x, 0, 0) for x in range(4)]
    assert links(v5p, ring, ring=True) == ("ici, 1 dim.", 180.0)
    assert links(v5p, ring[:2], ring=True) == ("ici, 1 dim.", 90.0)  # a part of the ring is a line
    plane = [(x, y, 0) for x in range(4) for y in range(4)]
    assert links(v5p, plane, ring=True) == ("ici, 2 dim.", 360.0)
    assert links(v5p, [(0, 0, 0), (0, 0, 1)], ring=True) == ("ici, 1 dim.", 90.0)
    part = Topology("v5p:4x4x2", (), chip_of("TPU v5p"), (4, 4, 2))  # less than a cube: no torus
    assert links(part, ring, ring=True) == ("ici, 1 dim.", 90.0)
    v5e = Topology("v5e:8x16", (), chip_of("TPU v5 lite"), (8, 16))
    assert links(v5e, [(0, y) for y in range(16)], ring=True)[1] == 2 * v5e.chip.link_gbps
    assert links(v5e, [(x, 0) for x in range(8)], ring=True)[1] == v5e.chip.link_gbps
    h100 = Topology("h100:2x8", (), chip_of("NVIDIA H100"), (2, 8))
    assert links(h100, [(0, gpu) for gpu in range(8)], ring=True) == ("nvlink", 450.0)
    assert links(h100, [(0, 0), (1, 0)], ring=True) == ("network", 50.0)
    assert links(h100, [(h, g) for h in range(2) for g in range(8)], ring=True) == ("network", 400.0)


def test_a_compiler_that_finds_no_place_says_how_much_it_wanted():
    error = _does_not_fit(
        "RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 20.50G of 15.75G hbm. Exceeded ..."
    )
    assert isinstance(error, DoesNotFit)
    assert error.bytes == 20.5 * GIB
    assert _does_not_fit("RESOURCE_EXHAUSTED: no more").bytes is None


@pytest.mark.parametrize("name", ["v5p", "v5p:4x4", "h100:8", "tpu:8", "cpu:0", "v5e:4x4x4"])
def test_another_topology_is_refused(name):
    with pytest.raises(TopologyError, match=r"topology: expected one like v5p:4x4x4"):
        topology(name)


@pytest.mark.parametrize(("name", "extra"), [("v5p:2x2x1", "plan-tpu"), ("h100:1x8", "plan-gpu")])
def test_a_missing_compiler_names_its_extra(monkeypatch, name, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(TopologyError, match=rf"pip install 'vcppo_jax\[{extra}\]'"):
        topology(name)


@pytest.mark.parametrize("name", ["v5e:2x2", "h100:1x2"])
def test_a_described_accelerator_compiles(name):
    """Where the compiler is installed."""
    try:
        top = topology(name)
    except TopologyError as error:
        pytest.skip(str(error))
    mesh = make_mesh({"fsdp": -1}, top.devices)
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16, sharding=named_sharding(mesh, ("embed", None)))
    with jax.set_mesh(mesh):
        cost = compile_program(jax.jit(lambda x, w: x @ w.T).trace(x, x), top, mesh).cost
    assert cost.total_flops == 2 * 256 * 256 * 512
    assert cost.flops * mesh.size == pytest.approx(cost.total_flops)
    assert cost.argument_bytes == 2 * 256 * 512 * 2 / mesh.size
    assert [t.kind for t in cost.transfers] == ["all-gather"]


def tiny_plan_config(tmp_path, *overrides):
    return tiny_config(tmp_path, "phases=[value,rl]", "mesh.fsdp=2", "mesh.tensor=2", *overrides)


@functools.cache
def tiny_plan(tmp_path) -> RunPlan:
    config = tiny_plan_config(tmp_path)
    return StepPrograms(config, topology("cpu:4"), Lengths(8, 8)).plan(("log-probs", "rollout"), print)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return tiny_plan(tmp_path_factory.mktemp("plan"))


def test_a_plan_has_what_the_engine_runs(plan):
    names = [program.name for program in plan.programs]
    assert names == ["log-probs", "reshard layer", "reshard rest", "new slots", "prefill", "swap", "decode"]
    by_name = {program.name: program for program in plan.programs}
    slots = by_name["new slots"].cost.output_bytes
    decode = by_name["decode"].cost
    assert decode.output_bytes < slots / 10  # the slots are written over
    assert by_name["decode"].trips == 32
    layer, rest = by_name["reshard layer"], by_name["reshard rest"]
    assert layer.calls == plan.policy.num_layers
    states = by_name["prefill"].resident_bytes - slots
    placed = layer.calls * layer.cost.output_bytes
    for program, earlier in ((layer, placed - layer.cost.output_bytes), (rest, placed)):
        assert program.resident_bytes + program.cost.argument_bytes == pytest.approx(
            states + earlier, rel=0.01
        )
    assert plan.fits
    assert step_times(plan) is None  # without the updates there is no step
    page = plan_page(plan, "vcppo plan", "title")
    assert "| decode | chunk of 32 tokens" in page
    assert json.loads(json.dumps(plan_json(plan, "vcppo plan")))["fits"] is True


def test_the_formula_of_mfu_is_what_the_jaxpr_has(plan):
    """Scoring is one forward pass over whole rows; the blocked form computes all pairs of a short row."""
    scored = plan.programs[0]
    policy = plan.policy
    rows = plan.config.rl.prompts_per_step * plan.config.rollout.n
    length = plan.config.data.max_prompt_tokens + plan.config.rollout.max_new_tokens
    micro_batches = scored.trips
    _, rows_each = scored.shape.split(" micro-batches of ")
    rows = micro_batches * int(rows_each.split(" x ")[0])
    lengths = np.full(int(rows), length)
    formula = forward_flops(policy, lengths, head="lm")
    attention = 2 * policy.num_layers * policy.num_heads * policy.head_dim * float((lengths**2).sum())
    assert scored.cost.total_flops == pytest.approx(formula + attention, rel=0.01)


def test_the_search_tries_meshes_that_divide_the_heads(tmp_path):
    config = tiny_plan_config(tmp_path)
    policy, value_model = network_configs(config)
    assert policy == value_model
    found = list(meshes(config, 8, (4,)))
    assert [(m["fsdp"], m["tensor"]) for m in found] == [(8, 1), (4, 2), (2, 4)]
    assert all(np.prod(list(m.values())) == 8 for m in found)


def test_the_command_plans_one_update(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(tiny_plan_config(tmp_path, "mesh.fsdp=1", "mesh.tensor=1")))
    out = tmp_path / "plan.json"
    words = ["plan", str(file), "--topology", "cpu:1", "--parts", "critic-update", "--json", str(out)]
    assert cli.main(words) == 0
    assert "**Fits**" in capsys.readouterr().out
    (program,) = json.loads(out.read_text())["programs"]
    assert program["name"] == "critic update"
    assert program["cost"]["bound"] in ("compute", "memory", "interconnect")
    # Forward, recomputed, and backward, at four micro-batches or so: more than one pass over the weights.
    assert program["cost"]["total_flops"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "decode"], "--parts: expected some of actor-update,critic-update"),
        (["--response-tokens", "999999"], "--response-tokens: expected a number from 1 to"),
    ],
)
def test_the_command_refuses(tmp_path, capsys, words, message):
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(tiny_plan_config(tmp_path)))
    assert cli.main(["plan", str(file), "--topology", "cpu:8", *words]) == 1
    assert message in capsys.readouterr().err


def made_up_cost(seconds: float) -> Cost:
    """Of a program that takes so long for its operations."""
    return Cost(0.0, 0.0, 0.0, 1.0, 1.0, 0.0, (), seconds, 0.0, 0.0, 0.0)


class MadeUpSteps(StepPrograms):
    """Nothing is compiled: an update needs more memory with more rows and less remat, and takes less time."""

    def plan(self, parts, say):
        per_shard = self.config.train.micro_batch_tokens // 36 // batch_shards(self.mesh)
        saved = {"full": 0, "dots": 300, "none": 700}[self.policy.remat]
        needed = (200 + 100 * per_shard + saved) * GIB
        seconds = 10.0 / per_shard - saved / 1000 + self.mesh.shape["tensor"]
        programs = [
            ProgramPlan(part, "", 1, 1, 0, made_up_cost(seconds), GIB if part == "rollout" else needed)
            for part in parts
        ]
        return RunPlan(
            self.config,
            self.topology,
            self.mesh,
            self.lengths,
            self.policy,
            self.value_model,
            tuple(programs),
        )


def test_the_search_ranks_what_fits_and_stops_where_nothing_more_can(tmp_path, monkeypatch):
    """Of 1,024 GiB, 921 may be used: by up to 4 rows with full remat or dots, by none without remat."""
    monkeypatch.setattr(plan_search, "StepPrograms", MadeUpSteps)
    config = tiny_plan_config(tmp_path)
    said = []
    found = plan_search.search(config, topology("cpu:2"), Lengths(8, 8), said.append)
    on_tensor = [(c.rows, c.remat, c.plan.fits) for c in found if c.mesh["tensor"] == 2]
    assert sorted(on_tensor) == [
        (1, "dots", True), (1, "full", True), (1, "none", False), (2, "dots", True), (2, "full", True),
        (4, "dots", True), (4, "full", True), (8, "dots", False), (8, "full", False),
    ]  # fmt: skip
    seconds = [c.seconds for c in found]
    assert seconds == sorted(seconds)
    best = found[0]
    assert (best.mesh["tensor"], best.rows, best.remat) == (1, 4, "dots")
    page = plan_search.search_page(found, "vcppo plan")
    assert page.splitlines()[4].startswith("| fsdp 2 | 4 | dots |")
    changed = load_config(write_config(tmp_path), ["phases=[value,rl]", *best.overrides().split()])
    assert (changed.model.remat, changed.mesh.tensor) == ("dots", 1)
    assert changed.train.micro_batch_tokens == 4 * 2 * 36
    assert json.loads(json.dumps(best.as_json()))["plan"]["fits"] is True


def test_states_that_do_not_fit_are_not_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_search, "StepPrograms", MadeUpSteps)
    top = topology("cpu:2")
    small = Topology("small", top.devices, dataclasses.replace(top.chip, memory_gib=1e-4), top.shape)
    found = plan_search.search(tiny_plan_config(tmp_path), small, Lengths(8, 8), print)
    assert [c.plan for c in found] == [None, None]
    assert "states alone" in plan_search.search_page(found, "vcppo plan")
