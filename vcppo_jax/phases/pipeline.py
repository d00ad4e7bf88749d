"""`vcppo run` and the phases alone: which phase runs when, and what is shown at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vcppo_jax.config import PHASES as ALL_PHASES
from vcppo_jax.config import Config
from vcppo_jax.config_load import ConfigError, dump_config
from vcppo_jax.phases import evaluate, grade, reward, rl, sft, value
from vcppo_jax.phases.evaluate import accuracy, mean_length
from vcppo_jax.phases.inputs import check_inputs
from vcppo_jax.phases.loop import Signals
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.run.metrics import read_metrics
from vcppo_jax.run.processes import from_main, gather, is_main
from vcppo_jax.run.progress import summary_table
from vcppo_jax.run.report import write_report

PHASES: dict[str, Callable[[Workspace], None]] = {
    "sft": sft.run,
    "reward": reward.run,
    "value": value.run,
    "rl": rl.run,
    "evaluate": evaluate.run,
    "grade": grade.run,
}


def run_phases(
    config: Config, phases: tuple[str, ...], *, again: tuple[str, ...] = (), signals: Signals | None = None
) -> Path:
    """Run the phases that are not finished, in order; the path of the report page.

    Phases in `again` (evaluation, when it is asked for by name) run even if they are finished. `signals`: as
    in `Workspace`. Raises ConfigError, before anything is written, where a file that a phase reads is not
    there.
    """
    _check_same(config)
    due = from_main(lambda: _due(config, phases, again))
    with Workspace(config, signals) as workspace:
        for phase in phases:
            workspace.signals.check()
            if phase == "evaluate" and len(phases) > 1 and not workspace.has_validation:
                workspace.progress.message("evaluate: left out, since data.validation is not set")
                continue
            if phase not in due:
                workspace.begin(phase)
                workspace.progress.message(f"{phase}: finished already in {workspace.run_dir / phase}")
                continue
            PHASES[phase](workspace)
    if is_main():
        headers = ("phase", "steps", "held-out accuracy", "response length", "value loss", "expl. var")
        summary_table(summary_rows(Path(config.run_dir)), headers=headers)
    return from_main(lambda: write_report(config.run_dir))


def _due(config: Config, phases: tuple[str, ...], again: tuple[str, ...]) -> list[str]:
    """The phases that have to run, their inputs checked."""
    due = [phase for phase in phases if phase in again or not finished(Path(config.run_dir) / phase)]
    check_inputs(config, due)
    return due


def _check_same(config: Config) -> None:
    """Raise ConfigError where a process was started with another configuration than process 0."""
    configs = gather(dump_config(config))
    others = [index for index, theirs in enumerate(configs) if theirs != configs[0]]
    if others:
        raise ConfigError(
            f"process {others[0]} was started with another configuration than process 0; start all processes "
            "with the same file and overrides"
        )


def finished(phase_dir: Path) -> bool:
    """Whether the phase has come to its end."""
    return (phase_dir / "summary.json").is_file()


def summary_rows(run_dir: Path) -> list[tuple[str, ...]]:
    """One row per finished phase: name, steps, accuracy, length, value loss, explained variance.

    A reward model's accuracy is that on held-out pairs.
    """
    rows: list[tuple[str, ...]] = []
    for phase in ALL_PHASES:
        if not finished(run_dir / phase):
            continue
        summary = json.loads((run_dir / phase / "summary.json").read_text(encoding="utf-8"))
        lines = read_metrics(run_dir / phase)
        last: dict[str, Any] = (lines[-1] if lines else {}) | summary
        loss = last.get("held_out/vf_loss", last.get("critic/vf_loss"))
        variance = last.get("held_out/vf_explained_var", last.get("critic/vf_explained_var"))
        length = mean_length(last)
        rows.append(
            (
                phase,
                str(summary.get("steps", "")),
                _number(last.get("held_out/acc", accuracy(last)), ".1%"),
                _number(last.get("response_length/mean") if length is None else length, ".1f"),
                _number(loss, ".4f"),
                _number(variance, ".3f"),
            )
        )
    return rows


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
