"""`vcppo plan --search`: meshes, micro-batches and remat policies, those that fit ranked by a step's time.

Larger micro-batches and cheaper remat need more memory, so a candidate is compiled only where the one
before it on that way fitted. Ranked are the updates and the rollout, which are nearly all of a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from vcppo_jax.aot.program import GIB
from vcppo_jax.aot.topology import Topology
from vcppo_jax.config import Config
from vcppo_jax.phases.plan import SPARE, Lengths, RunPlan, StepPrograms, network_configs
from vcppo_jax.phases.plan_report import plan_json
from vcppo_jax.sharding import WEIGHT_AXES, batch_shards, make_mesh

REMAT = ("full", "dots", "none")
"""From least to most memory."""
ROWS = (1, 2, 4, 8)
"""Rows of a micro-batch in each part of the batch axis."""
UPDATES = ("actor-update", "critic-update")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice, and its plan; None where the states alone do not fit."""

    mesh: dict[str, int]
    rows: int
    remat: str
    plan: RunPlan | None
    state_bytes: float

    @property
    def seconds(self) -> float:
        """Updates and rollout of a step, at the roofline."""
        if self.plan is None or not self.plan.fits:
            return math.inf
        return sum(program.seconds for program in self.plan.programs)

    def overrides(self) -> str:
        """What makes a configuration this choice."""
        mesh = " ".join(f"mesh.{axis}={size}" for axis, size in self.mesh.items())
        tokens = None if self.plan is None else self.plan.config.train.micro_batch_tokens
        return f"{mesh} train.micro_batch_tokens={tokens} model.remat={self.remat}"

    def as_json(self) -> dict[str, Any]:
        """The choice and its plan as plain numbers."""
        choice = {"mesh": self.mesh, "rows": self.rows, "remat": self.remat, "state_bytes": self.state_bytes}
        plan = None if self.plan is None else plan_json(self.plan, self.overrides())
        return {**choice, "seconds": None if math.isinf(self.seconds) else self.seconds, "plan": plan}


def meshes(config: Config, chips: int, heads: tuple[int, ...]) -> Iterator[dict[str, int]]:
    """Sizes of fsdp and tensor that multiply to `chips`; tensor divides the `heads` of every network.

    Sizes of other axes stay those of the configuration.
    """
    sizes = config.mesh.sizes
    fixed = {axis: size for axis, size in sizes.items() if axis not in WEIGHT_AXES and size not in (-1, 1)}
    left = chips // math.prod(fixed.values())
    first, second = WEIGHT_AXES
    for tensor in range(1, left + 1):
        if left % tensor == 0 and all(count % tensor == 0 for count in heads):
            ones = dict.fromkeys((axis for axis in sizes if axis not in (*fixed, *WEIGHT_AXES)), 1)
            yield {**ones, **fixed, first: left // tensor, second: tensor}


def search(
    config: Config, topology: Topology, lengths: Lengths, say: Callable[[str], None]
) -> list[Candidate]:
    """All candidates that were looked at, the best first."""
    networks = [network for network in network_configs(config) if network is not None]
    heads = tuple(network.num_heads for network in networks)
    found: list[Candidate] = []
    for mesh in meshes(config, len(topology.devices), heads):
        found += _on_mesh(config, topology, lengths, mesh, say)
    return sorted(found, key=lambda candidate: candidate.seconds)


def _on_mesh(
    config: Config, topology: Topology, lengths: Lengths, mesh: dict[str, int], say: Callable[[str], None]
) -> Iterator[Candidate]:
    """Candidates on one mesh, until one does not fit."""
    base = _changed(config, mesh=mesh, rows=1, remat=REMAT[0], topology=topology)
    steps = StepPrograms(base, topology, lengths)
    states = steps.actor_bytes + steps.critic_bytes + steps.reference_bytes
    if states > (1 - SPARE) * topology.chip.memory_gib * GIB:
        yield Candidate(mesh, 1, REMAT[0], None, states)
        return
    spelled = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    rollout = steps.plan(("rollout",), lambda line: say(f"[{spelled}] {line}")).programs
    most = -(-config.rl.mini_batch_size // batch_shards(steps.mesh))
    for remat in REMAT:
        for rows in (rows for rows in ROWS if rows <= most):
            changed = _changed(config, mesh=mesh, rows=rows, remat=remat, topology=topology)
            say(f"[{spelled}; {rows} rows, remat {remat}] updates")
            plan = StepPrograms(changed, topology, lengths).plan(UPDATES, _quiet)
            plan = dataclasses.replace(plan, programs=(*plan.programs, *rollout))
            yield Candidate(mesh, rows, remat, plan, states)
            if not plan.fits:
                if rows == ROWS[0]:
                    return
                break


def _changed(config: Config, *, mesh: dict[str, int], rows: int, remat: str, topology: Topology) -> Config:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    row_tokens = max(config.train.row_tokens or 0, longest)
    shards = batch_shards(make_mesh(mesh, topology.devices))
    tokens = rows * shards * row_tokens
    return config.model_copy(
        update={
            "mesh": config.mesh.model_copy(update=mesh),
            "train": config.train.model_copy(update={"micro_batch_tokens": tokens}),
            "model": config.model.model_copy(update={"remat": remat}),
        }
    )


def _quiet(_: str) -> None:
    """The search tells of whole candidates."""


def search_page(found: list[Candidate], command: str) -> str:
    """The Markdown table of a search."""
    lines = [
        f"    {command}",
        "",
        "| mesh | rows | remat | of a chip's memory | updates and rollout, s a step | as overrides |",
        "|---|---|---|---|---|---|",
    ]
    for candidate in found:
        plan = candidate.plan
        mesh = " x ".join(f"{axis} {size}" for axis, size in candidate.mesh.items() if size > 1)
        if plan is None:
            share = f"states alone {candidate.state_bytes / GIB:.1f} GiB"
        else:
            share = "more than there is" if plan.used is None else f"{plan.used:.1%}"
        seconds = "does not fit" if math.isinf(candidate.seconds) else f"{candidate.seconds:,.0f}"
        overrides = "" if plan is None else f"`{candidate.overrides()}`"
        lines.append(f"| {mesh} | {candidate.rows} | {candidate.remat} | {share} | {seconds} | {overrides} |")
    return "\n".join(lines) + "\n"
