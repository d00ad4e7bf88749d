"""What the runs of a study came to: numbers per run, statistics and curves over seeds, without JAX."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from vcppo_jax.run.report import PhaseRecord, held_out_accuracy, read_phase

STATUS_FILE = "status.json"
"""In the directory of a run that failed, was refused or skipped: `{"status": ..., "message": ...}`."""


@dataclass(frozen=True)
class Budget:
    """What one RL step costs, and what the value model's pretraining cost before."""

    samples_per_step: int
    updates_per_step: int
    """Updates of the policy."""
    warmup_steps: int
    """First steps in which the policy is not updated."""
    pretraining_samples: int


@dataclass(frozen=True)
class PlannedRun:
    """One seed of an arm or a stage."""

    seed: int
    run_dir: Path
    steps: Mapping[str, int | None]
    """Phase -> planned steps (None: not known before), in order."""
    budget: Budget

    @cached_property
    def phases(self) -> dict[str, PhaseRecord]:
        """What the phase directories hold; files that are absent count as empty."""
        return {name: read_phase(self.run_dir / name) for name in self.steps}

    @cached_property
    def recorded(self) -> dict[str, str]:
        """`status` and `message` of a run that failed or was refused, else {}."""
        try:
            found = json.loads((self.run_dir / STATUS_FILE).read_text(encoding="utf-8"))
            return {"status": str(found["status"]), "message": str(found["message"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    @property
    def status(self) -> str:
        """finished, failed, refused, skipped, unfinished or absent."""
        if self.recorded:
            return self.recorded["status"]
        if all(record.summary.get("finished") for record in self.phases.values()):
            return "finished"
        started = any(record.metrics or record.summary for record in self.phases.values())
        return "unfinished" if started else "absent"

    @property
    def note(self) -> str | None:
        """What the page says of a run that is not finished."""
        if self.recorded:
            return f"{self.recorded['status']}: {self.recorded['message']}"
        if self.status == "absent":
            return "has not run yet"
        for name, record in self.phases.items():
            if not record.summary.get("finished"):
                steps, done = self.steps[name], record.metrics[-1]["step"] if record.metrics else 0
                return f"not finished: {name} at step {done}" + (f" of {steps}" if steps else "")
        return None


@dataclass(frozen=True)
class Group:
    """An arm or a stage with its seeds."""

    name: str
    label: str
    runs: tuple[PlannedRun, ...]

    @property
    def finished(self) -> tuple[PlannedRun, ...]:
        """The runs whose numbers count in tables."""
        return tuple(run for run in self.runs if run.status == "finished")

    @property
    def shown(self) -> tuple[PlannedRun, ...]:
        """The runs that have curves: all but those of other settings."""
        return tuple(run for run in self.runs if run.status in ("finished", "failed", "unfinished"))

    @property
    def notes(self) -> list[str]:
        """One line per seed that is not finished."""
        return [f"{self.label}, seed {run.seed}: {run.note}" for run in self.runs if run.note is not None]


# Numbers of one run.


def metric(line: Mapping[str, Any], name: str) -> float | None:
    """A metric of a line; `held_out/accuracy` and `held_out/response_length` are means over the sources."""
    if name == "held_out/accuracy":
        return _mean(held_out_accuracy(line).values())
    if name == "held_out/response_length":
        return _mean(
            float(value)
            for key, value in line.items()
            if key.startswith("val-aux/") and key.endswith("/response_length/mean")
        )
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _rl(run: PlannedRun) -> list[dict[str, Any]]:
    return run.phases["rl"].metrics if "rl" in run.phases else []


def _over_rl(run: PlannedRun, name: str) -> list[float]:
    return [value for line in _rl(run) if (value := metric(line, name)) is not None]


def _first(name: str) -> Callable[[PlannedRun], float | None]:
    return lambda run: next(iter(_over_rl(run, name)), None)


def _last(name: str) -> Callable[[PlannedRun], float | None]:
    return lambda run: next(reversed(_over_rl(run, name)), None)


def _end(name: str) -> Callable[[PlannedRun], float | None]:
    """In the evaluation at the end, or else at the last step that has it."""

    def read(run: PlannedRun) -> float | None:
        evaluated = metric(run.phases["evaluate"].final, name) if "evaluate" in run.phases else None
        return _last(name)(run) if evaluated is None else evaluated

    return read


def _best_accuracy(run: PlannedRun) -> float | None:
    found = [*_over_rl(run, "held_out/accuracy"), _end("held_out/accuracy")(run)]
    return max((value for value in found if value is not None), default=None)


def _steps(run: PlannedRun) -> int:
    return _rl(run)[-1]["step"] if _rl(run) else 0


def _samples(run: PlannedRun) -> float | None:
    rounds = sum(line.get("dynamic_sampling/rounds", 1) for line in _rl(run) if line["step"] > 0)
    return float(run.budget.samples_per_step * rounds) if _rl(run) else None


def _updates(run: PlannedRun) -> float | None:
    steps = max(0, _steps(run) - run.budget.warmup_steps)
    return float(run.budget.updates_per_step * steps) if _rl(run) else None


@dataclass(frozen=True)
class Quantity:
    """A column of the tables."""

    label: str
    form: str
    read: Callable[[PlannedRun], float | None]


QUANTITIES: dict[str, Quantity] = {
    "accuracy_before": Quantity("accuracy, before", ".1%", _first("held_out/accuracy")),
    "accuracy_end": Quantity("accuracy, end", ".1%", _end("held_out/accuracy")),
    "accuracy_best": Quantity("accuracy, best evaluation", ".1%", _best_accuracy),
    "length_before": Quantity("length, before (tokens)", ".1f", _first("held_out/response_length")),
    "length_end": Quantity("length, end (tokens)", ".1f", _end("held_out/response_length")),
    "value_loss": Quantity("value loss", ".4f", _last("critic/vf_loss")),
    "explained_variance": Quantity("explained variance", ".3f", _last("critic/vf_explained_var")),
    "score": Quantity("score", "+.3f", _last("critic/score/mean")),
    "samples": Quantity("samples", ",.0f", _samples),
    "updates": Quantity("updates", ",.0f", _updates),
    "pretraining_samples": Quantity(
        "samples of value-pretraining", ",.0f", lambda run: float(run.budget.pretraining_samples)
    ),
}
FOOTNOTE = (
    "Mean ± sample standard deviation over seeds, then the value of each seed. Accuracy and length: "
    "held-out problems; the best evaluation is the highest of all before, during and after RL, so it is "
    "biased upwards. Value loss, explained variance and score: rollouts of the last RL step, the first two "
    "against each arm's own targets, which depend on lambda_critic. Samples: responses drawn in RL. Updates: "
    "of the policy."
)


# Over seeds.


@dataclass(frozen=True)
class Statistic:
    """A number over seeds."""

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None without any."""
        return fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation, over n - 1; None with fewer than two seeds."""
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


def statistic(group: Group, quantity: Quantity) -> Statistic:
    """A quantity over the finished seeds that have it."""
    found = {run.seed: quantity.read(run) for run in group.finished}
    return Statistic(_finite(found.items()))


@dataclass(frozen=True)
class Curve:
    """Seeds' values of a metric over steps, or of a quantity over positions."""

    by_seed: Mapping[int, Mapping[int, float]]
    """Seed -> x -> finite value."""

    @property
    def x(self) -> list[int]:
        """Every x at which some seed has a value, rising."""
        return sorted({x for values in self.by_seed.values() for x in values})

    def over_seeds(self, function: Callable[[Sequence[float]], float]) -> list[float]:
        """A function (mean, min, max) of the seeds' values at each x."""
        return [function([values[x] for values in self.by_seed.values() if x in values]) for x in self.x]


def metric_curve(group: Group, name: str, phase: str | None = None) -> Curve:
    """A metric over the steps of `phase` (None: the last phase that trains)."""
    by_seed = {}
    for run in group.shown:
        chosen = phase or next(p for p in reversed(run.phases) if p != "evaluate")
        if chosen in run.phases:
            lines = run.phases[chosen].metrics
            by_seed[run.seed] = _finite((line["step"], metric(line, name)) for line in lines)
    return Curve({seed: values for seed, values in by_seed.items() if values})


def _finite(points: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    return {x: value for x, value in points if value is not None and math.isfinite(value)}


def read_positions(group: Group) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """(seed -> `rl/positions.json`, one note per seed that has none)."""
    found: dict[int, dict[str, Any]] = {}
    notes = []
    for run in group.shown:
        file = run.run_dir / "rl" / "positions.json"
        try:
            found[run.seed] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
            notes.append(f"{group.label}, seed {run.seed}: rl/positions.json {reason}")
    return found, notes


def position_curve(positions: Mapping[int, Mapping[str, Any]], part: str, name: str) -> Curve:
    """`name` of the part "by_position" or "by_distance_to_end" over its index, where tokens were counted."""
    by_seed = {}
    for seed, content in positions.items():
        values, counts = content.get(part, {}).get(name), content.get(part, {}).get("count")
        if values and counts:
            pairs = zip(values, counts, strict=True)
            by_seed[seed] = _finite((x, value) for x, (value, count) in enumerate(pairs) if count > 0)
    return Curve({seed: values for seed, values in by_seed.items() if values})
