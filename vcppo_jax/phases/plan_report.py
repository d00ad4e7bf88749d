"""What a plan says: times of a step and of the run, as JSON and as a Markdown page."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from typing import Any

import numpy as np

from vcppo_jax.aot.program import GIB
from vcppo_jax.phases.plan import SPARE, ProgramPlan, RunPlan
from vcppo_jax.phases.utilisation import step_flops

ROLLOUT = ("reshard layer", "reshard rest", "new slots", "prefill", "swap", "decode")
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda12-plugin")


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Predicted for one step of RL and for the run: all at the roofline, decoding with the largest cache."""

    seconds: float
    rollout_seconds: float
    tokens_per_second: float
    """Of prompts and responses, as `perf/throughput`."""
    mfu: float
    days: float
    """Of value-pretraining, where `phases` has it, and RL."""


def step_times(plan: RunPlan) -> StepTimes | None:
    """The times; None where a program does not fit, or was not asked for."""
    by_name = {program.name: program for program in plan.programs}
    wanted = {*ROLLOUT, "log-probs", "actor update"}
    wanted |= {"values", "critic update"} if plan.value_model is not None else set()
    if wanted - set(by_name) or any(program.cost is None for program in plan.programs):
        return None
    config, lengths = plan.config, plan.lengths
    samples = config.rl.prompts_per_step * config.rollout.n
    seconds = sum(program.seconds for program in plan.programs)
    rollout = sum(by_name[name].seconds for name in ROLLOUT)
    flops = step_flops(
        config,
        plan.policy,
        plan.value_model,
        np.full(samples, lengths.total),
        has_reference=config.algorithm.kl_coef > 0,
        trains_actor=True,
    )
    peak = plan.topology.chip.tflops * 1e12 * plan.mesh.size
    total = config.rl.steps * seconds
    if "value" in config.phases and plan.value_model is not None:
        # The same programs, without the policy's updates, for as many sequences as a step of the phase has.
        ratio = config.value.prompts_per_step / config.rl.prompts_per_step
        names = (*ROLLOUT, "values", "critic update")
        total += config.value.steps * ratio * sum(by_name[name].seconds for name in names)
    return StepTimes(
        seconds, rollout, samples * lengths.total / seconds, flops / seconds / peak, total / 86400
    )


def plan_json(plan: RunPlan, command: str) -> dict[str, Any]:
    """The plan as plain numbers: bytes, operations and seconds of one chip unless a name says otherwise."""
    chip, times = plan.topology.chip, step_times(plan)
    return {
        "command": command,
        "versions": versions(),
        "topology": {"name": plan.topology.name, "chips": plan.mesh.size, **dataclasses.asdict(chip)},
        "mesh": dict(plan.mesh.shape),
        "decode_tensor": plan.config.mesh.decode_tensor,
        "remat": plan.policy.remat,
        "micro_batch_tokens": plan.config.train.micro_batch_tokens,
        "tokens": {"prompt": plan.lengths.prompt, "response": plan.lengths.response},
        "programs": [_program_json(program) for program in plan.programs],
        "used": plan.used,
        "fits": plan.fits,
        "step": None if times is None else dataclasses.asdict(times),
    }


def _program_json(program: ProgramPlan) -> dict[str, Any]:
    numbers = dataclasses.asdict(program)
    cost = program.cost
    if cost is not None:
        numbers["cost"] |= {"peak_bytes": cost.peak_bytes, "seconds": cost.seconds, "bound": cost.bound}
    return numbers


def versions() -> dict[str, str]:
    """Of what compiled the programs."""
    found = {}
    for name in COMPILERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def plan_page(plan: RunPlan, command: str, title: str) -> str:
    """The Markdown page of a plan."""
    chip, lengths = plan.topology.chip, plan.lengths
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items() if size > 1) or "one chip"
    lines = [
        f"# {title}",
        "",
        f"    {command}",
        "",
        f"{plan.mesh.size} chips ({chip.name}: {chip.tflops:g} TFLOP/s bfloat16, {chip.memory_gib:g} GiB at "
        f"{chip.memory_gbps:g} GB/s), mesh {mesh}, remat {plan.policy.remat}. Times are for prompts of "
        f"{lengths.prompt} and responses of {lengths.response} tokens; memory is for the longest that the "
        "configuration allows. Compiled with "
        f"{', '.join(f'{name} {version}' for name, version in versions().items())}.",
        "",
        *_verdict(plan),
        "",
        "## Memory of one chip, GiB",
        "",
        "| program | compiled for | arguments | results | temporaries | resident | all | share |",
        "|---|---|---|---|---|---|---|---|",
        *(_memory_row(program, plan.memory_bytes) for program in plan.programs),
        "",
        "Results are those not written over donated arguments. Resident is what the chip holds besides: "
        "states of the other network, weights and slots of the rollout.",
        "",
        "## Time, at the roofline",
        "",
        "| program | calls a step | TFLOP | repeated | GB of memory | compute | memory | interconnect "
        "| bound by | s a step |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_time_row(program, plan.mesh.size) for program in plan.programs if program.cost is not None),
        "",
        "TFLOP, GB and milliseconds are of one call on one chip, loops counted as often as they run. "
        "Repeated is the share of the operations that other chips do too. The time of a call is the largest "
        "of the three.",
        "",
        "## Collectives of one call",
        "",
        "| program | kind | devices | over | calls | MB | ms |",
        "|---|---|---|---|---|---|---|",
        *(row for program in plan.programs for row in _transfer_rows(program)),
        "",
    ]
    return "\n".join(lines)


def _verdict(plan: RunPlan) -> list[str]:
    if plan.used is None:
        failed = ", ".join(program.name for program in plan.programs if program.needed_bytes is None)
        first = f"**Does not fit**: the compiler found no place for {failed}."
    else:
        worst = max(plan.programs, key=lambda program: program.needed_bytes or 0.0)
        verdict = "Fits" if plan.fits else "Does not fit"
        first = (
            f"**{verdict}**: at most {plan.used:.1%} of a chip's memory ({worst.name}); a plan must leave "
            f"{SPARE:.0%} free."
        )
    times = step_times(plan)
    if times is None:
        return [first]
    return [
        first,
        "",
        f"A step: {times.seconds:,.0f} s, of which the rollout {times.rollout_seconds:,.0f} s; "
        f"{times.tokens_per_second:,.0f} tokens/s, MFU {times.mfu:.1%}; the run: {times.days:.1f} days. "
        "Not measured: every program is at its roofline, decode steps have the largest cache, and there is "
        "no waiting, no host and no evaluation.",
    ]


def _memory_row(program: ProgramPlan, memory: float) -> str:
    needed = program.needed_bytes
    all_, share = ("?", "?") if needed is None else (f"{needed / GIB:.2f}", f"{needed / memory:.1%}")
    cost = program.cost
    own = ["does not fit", "", ""]
    if cost is not None:
        parts = (cost.argument_bytes, cost.output_bytes, cost.temporary_bytes)
        own = [f"{part / GIB:.2f}" for part in parts]
    cells = [program.name, program.shape, *own, f"{program.resident_bytes / GIB:.2f}", all_, share]
    return f"| {' | '.join(cells)} |"


def _time_row(program: ProgramPlan, chips: int) -> str:
    cost = program.cost
    assert cost is not None
    repeated = 1 - cost.total_flops / (cost.flops * chips) if cost.flops else 0.0
    times = (cost.compute_seconds, cost.memory_seconds, cost.interconnect_seconds)
    cells = [
        program.name,
        f"{program.calls:,.0f}",
        f"{cost.flops / 1e12:,.3g}",
        f"{max(0.0, repeated):.0%}",
        f"{cost.memory_bytes / 1e9:,.3g}",
        *(f"{time * 1e3:,.3g} ms" for time in times),
        cost.bound,
        f"{program.seconds:,.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _transfer_rows(program: ProgramPlan, most: int = 4) -> list[str]:
    """The `most` that take longest, if they take a hundredth of the program's time."""
    if program.cost is None:
        return []
    floor = program.cost.seconds / 100
    transfers = sorted(program.cost.transfers, key=lambda t: -t.seconds)
    return [
        f"| {program.name} | {t.kind} | {t.devices} | {t.over} | {math.ceil(t.calls):,} | "
        f"{t.payload_bytes / 1e6:,.4g} | {t.seconds * 1e3:,.3g} |"
        for t in transfers[:most]
        if t.seconds >= floor
    ]
