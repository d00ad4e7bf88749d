"""The report of a run: one self-contained HTML page from what lies in the run directory, without JAX.

Reads, for each phase directory that is there, `metrics.jsonl`, `samples.jsonl` and `summary.json`, and the
run's `config.yaml`. What is missing or damaged is named on the page; the rest is shown.
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
import yaml

from vcppo_jax.run.files import writing
from vcppo_jax.run.metrics import MetricsError, read_metrics, read_step_log
from vcppo_jax.run.report_charts import phase_charts
from vcppo_jax.run.report_samples import pick_samples

PHASES = {
    "sft": "Cold start",
    "reward": "Reward model",
    "value": "Value-pretraining",
    "rl": "Reinforcement learning",
    "evaluate": "Evaluation",
}
"""Phase directory -> title, in the order of the page."""
_SAMPLES_PER_STEP = {"sft": 2, "reward": 0, "value": 1, "rl": 2, "evaluate": 6}


@dataclass(frozen=True)
class PhaseRecord:
    """What one phase directory holds."""

    name: str
    metrics: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """One line per file that could not be read."""

    @property
    def final(self) -> dict[str, Any]:
        """The last line of metrics with the summary over it."""
        return {**(self.metrics[-1] if self.metrics else {}), **self.summary}


def read_phase(directory: Path) -> PhaseRecord:
    """The record of a phase directory; files that are absent count as empty, damaged ones become problems."""
    problems = []
    metrics: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    try:
        if (directory / "metrics.jsonl").exists():
            # a value that is no number (a file written by hand) is left out
            metrics = [
                {name: value for name, value in line.items() if isinstance(value, (int, float))}
                for line in read_metrics(directory)
            ]
    except MetricsError as error:
        problems.append(str(error))
    try:
        if (directory / "samples.jsonl").exists():
            samples = read_step_log(directory / "samples.jsonl")
    except MetricsError as error:
        problems.append(str(error))
    try:
        if (directory / "summary.json").exists():
            summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
            if not isinstance(summary, dict):
                raise ValueError("expected a JSON object")
    except (OSError, ValueError) as error:
        summary = {}
        problems.append(f"{directory / 'summary.json'}: {error}")
    return PhaseRecord(directory.name, metrics, samples, summary, tuple(problems))


def held_out_accuracy(metrics: Mapping[str, Any]) -> dict[str, float]:
    """`val-core/<source>/acc/mean@k` by source; {} if there is none."""
    return {
        name.removeprefix("val-core/").rsplit("/acc/mean@", 1)[0]: float(value)
        for name, value in metrics.items()
        if name.startswith("val-core/") and "/acc/mean@" in name and isinstance(value, (int, float))
    }


@dataclass(frozen=True)
class Tile:
    """One figure of the headline, as text."""

    label: str
    before: str | None
    after: str
    note: str


def _first_and_last(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of the first and the last line that has a finite `name`; [] if none has."""
    found = [(line["step"], float(line[name])) for line in lines if math.isfinite(line.get(name, math.nan))]
    return [found[0], found[-1]] if found else []


def _held_out_tile(phases: Mapping[str, PhaseRecord]) -> Tile | None:
    """Held-out accuracy after the cold start (or early in RL) and at the end, over the sources of both."""
    rl = phases.get("rl", PhaseRecord("rl"))
    in_rl = [
        (found, f"at RL step {line['step']}") for line in rl.metrics if (found := held_out_accuracy(line))
    ]
    before = [(held_out_accuracy(phases["sft"].final), "after the cold start")] if "sft" in phases else []
    after = (
        [(held_out_accuracy(phases["evaluate"].final), "in the evaluation")] if "evaluate" in phases else []
    )
    before = [item for item in before if item[0]] + in_rl[:1]
    after = [item for item in after if item[0]] + in_rl[-1:]
    if not before and not after:
        return None
    if not before or not after or not (common := before[0][0].keys() & after[0][0].keys()):
        (by_source, when) = (after or before)[0]
        return Tile("Accuracy", None, f"{fmean(by_source.values()):.1%}", f"held-out problems, {when}")
    first, last = (
        fmean(by_source[source] for source in sorted(common)) for by_source, _ in (before[0], after[0])
    )
    return Tile(
        "Accuracy", f"{first:.1%}", f"{last:.1%}", f"held-out problems, {before[0][1]} and {after[0][1]}"
    )


def _accuracy_tile(phases: Mapping[str, PhaseRecord]) -> Tile | None:
    """Held-out accuracy before and after, or else that of the samples in training; None without either."""
    held_out = _held_out_tile(phases)
    rl = phases.get("rl", PhaseRecord("rl"))
    training = _first_and_last(rl.metrics, "critic/acc/mean")
    if (held_out is not None and held_out.before is not None) or not training:
        return held_out
    (first_step, first), (last_step, last) = training
    note = f"samples in training, RL steps {first_step} and {last_step}"
    return Tile("Accuracy", f"{first:.1%}", f"{last:.1%}", note)


_CHANGES = (
    ("rl", "response_length/mean", "Response length", "{:.1f}", "tokens, mean of RL steps"),
    ("rl", "critic/score/mean", "Score", "{:+.3f}", "mean of RL steps"),
    ("value", "critic/vf_loss", "Value loss", "{:.4g}", "value-pretraining, steps"),
    ("value", "critic/vf_explained_var", "Explained variance", "{:+.3f}", "value-pretraining, steps"),
    ("sft", "sft/loss", "Cold-start loss", "{:.4g}", "nats per token, steps"),
)


def headline(phases: Mapping[str, PhaseRecord]) -> list[Tile]:
    """The figures at the top, each before and after; those without data are left out."""
    tiles = []
    if accuracy := _accuracy_tile(phases):
        tiles.append(accuracy)
    for phase, name, label, form, note in _CHANGES:
        if phase in phases and (change := _first_and_last(phases[phase].metrics, name)):
            (first_step, first), (last_step, last) = change
            tiles.append(
                Tile(label, form.format(first), form.format(last), f"{note} {first_step} and {last_step}")
            )
    if (accuracy := phases.get("reward", PhaseRecord("reward")).summary.get("held_out/acc")) is not None:
        tiles.append(Tile("Reward model's accuracy", None, f"{accuracy:.1%}", "held-out pairs"))
    return tiles


def evaluation_table(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(column names, rows of source and cells) of the `val-core/<source>/<variable>/<metric>` figures.

    A source may hold slashes. Fractions of `acc` are shown as percentages.
    """
    cells: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for name, value in metrics.items():
        group, _, rest = name.partition("/")
        parts = rest.rsplit("/", 2)
        if group not in ("val-core", "val-aux") or len(parts) != 3 or not isinstance(value, (int, float)):
            continue
        source, variable, metric = parts
        column = f"{variable} {metric}"
        if column not in columns:
            columns.append(column)
        cells.setdefault(source, {})[column] = f"{value:.1%}" if variable == "acc" else f"{value:.4g}"
    rows = [[source, *(row.get(column, "") for column in columns)] for source, row in cells.items()]
    return columns, rows


@dataclass(frozen=True)
class Stage:
    """One stage's part of a phase's time."""

    name: str
    seconds: float
    share: float


def timing(metrics: Sequence[Mapping[str, Any]]) -> tuple[float, list[Stage]]:
    """(seconds of all steps, stages by falling time) from `timing_s/*`.

    `timing_s/step` is the whole step; what its stages don't account for becomes "other". Without it the
    stages' sum is the whole.
    """
    sums: dict[str, float] = {}
    for line in metrics:
        for name, value in line.items():
            if name.startswith("timing_s/") and math.isfinite(value):
                stage = name.removeprefix("timing_s/")
                sums[stage] = sums.get(stage, 0.0) + value
    total = sums.pop("step", None)
    if total is None:
        total = sum(sums.values())
    elif sums and total > sum(sums.values()):
        sums["other"] = total - sum(sums.values())
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return total, [Stage(name, seconds, seconds / total if total else 0.0) for name, seconds in ordered]


def _metric_table(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(name, first value, last value) of every metric but the times, in order of first appearance."""
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for line in metrics:
        for name, value in line.items():
            if name != "step" and not name.startswith("timing_s/"):
                first.setdefault(name, value)
                last[name] = value
    return [(name, f"{first[name]:.6g}", f"{last[name]:.6g}") for name in first]


_STEPS_PLANNED = {
    "sft": ("sft", "steps"),
    "reward": ("reward_model", "steps"),
    "value": ("value", "steps"),
    "rl": ("rl", "steps"),
}


def missing(run_dir: Path, config: Mapping[str, Any], phases: Mapping[str, PhaseRecord]) -> list[str]:
    """One sentence for each thing that the page would show and the run directory lacks."""
    notes = [] if config else ["config.yaml is not there or cannot be read."]
    planned = config.get("phases") or list(PHASES)
    for name, title in PHASES.items():
        record = phases.get(name)
        if record is None:
            if name in planned:
                notes.append(f"{title} ({name}) has not run.")
            continue
        notes += record.problems
        if not record.metrics and not record.summary and not record.problems:
            notes.append(f"{title} ({name}) has no metrics yet.")
        section, key = _STEPS_PLANNED.get(name, (name, ""))
        steps = (config.get(section) or {}).get(key)
        done = record.metrics[-1]["step"] if record.metrics else 0
        settles = name == "value" and (config.get("value") or {}).get("settle")
        if isinstance(steps, int) and record.metrics and done < steps and not settles:
            notes.append(f"{title} ({name}) is at step {done} of {steps}.")
    if not phases and not config:
        return [f"{run_dir} holds no run yet: no config.yaml and no phase directory."]
    return notes


def _read_config(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """(text, parsed) of config.yaml; empty where it is absent or damaged."""
    try:
        text = (run_dir / "config.yaml").read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return "", {}
    return text, config if isinstance(config, dict) else {}


def _phase_view(record: PhaseRecord) -> dict[str, Any]:
    """What the template shows of one phase."""
    seconds, stages = timing(record.metrics)
    columns, rows = evaluation_table(record.final)
    plain_summary = {
        name: f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in record.summary.items()
        if not name.startswith(("val-core/", "val-aux/")) and not isinstance(value, (dict, list))
    }
    return {
        "name": record.name,
        "title": PHASES[record.name],
        "steps": record.metrics[-1]["step"] if record.metrics else None,
        "charts": phase_charts(record.name, record.metrics),
        "summary": plain_summary,
        "evaluation_columns": columns,
        "evaluation_rows": rows,
        "seconds": seconds,
        "stages": stages,
        "samples": pick_samples(record.samples, per_step=_SAMPLES_PER_STEP[record.name]),
        "metrics": _metric_table(record.metrics),
    }


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `run_dir/report.html` and return its path.

    The page needs no other file and no network. Raises FileNotFoundError if `run_dir` is no directory.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: expected the directory of a run")
    config_text, config = _read_config(run_dir)
    phases = {name: read_phase(run_dir / name) for name in PHASES if (run_dir / name).is_dir()}
    return write_page(
        run_dir / "report.html",
        "report.html.j2",
        run=run_dir.resolve().name,
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        model=(config.get("model") or {}).get("path"),
        missing=missing(run_dir, config, phases),
        tiles=headline(phases),
        phases=[_phase_view(record) for record in phases.values()],
        config=config_text,
    )


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write `path` from a template of this package, whole or not at all; returns it.

    Values are escaped where the template's name has `.html`. Raises WriteError.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=".html" in template,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(values).encode("utf-8", errors="replace")
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        partial.write_bytes(page)
        os.replace(partial, path)
    return path
