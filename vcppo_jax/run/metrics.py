"""Metrics of a phase: JSON lines always, TensorBoard and Weights & Biases if asked.

`metrics.jsonl` has one object per step: `{"step": 3, "critic/score/mean": -0.25, ...}`, names as verl's.
Numbers are written with every digit that the float has (the shortest text that reads back to the same
float64), so that two runs can be compared bit for bit. JSON has no NaN or infinity: they are written as the
strings "NaN", "Infinity" and "-Infinity", which `read_metrics` turns back into floats.

On resume at step k, lines of later steps are dropped, so the file of a resumed run equals that of an
uninterrupted one except for what a clock measured (`timing_s/*`, `perf/*`).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from vcppo_jax.run.files import writing
from vcppo_jax.run.tensorboard import TensorBoard

_FROM_TEXT = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsError(RuntimeError):
    """A metrics file or logger that cannot be used; the message is one line for the user."""


def _as_number(name: str, value: Any) -> int | float:
    """A metric as int or float; arrays of one element (NumPy, JAX) count. Raises TypeError that names it."""
    if hasattr(value, "item"):
        if getattr(value, "size", 1) != 1:
            raise TypeError(f"metric {name!r}: expected one number, got an array of shape {value.shape}")
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return int(value) if isinstance(value, bool) else value
    raise TypeError(f"metric {name!r}: expected one number, got {type(value).__name__} {value!r}")


def _to_json(value: Any) -> Any:
    """The value with non-finite floats as the strings that `_from_json` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def read_step_log(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that `StepLog` wrote, non-finite numbers as their strings.

    A half-written last line is left out. Raises MetricsError with file and line where another is damaged.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise MetricsError(f"{path}: cannot read: {error.strerror}") from None
    objects = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            if not isinstance(item, dict) or not isinstance(item.get("step"), int):
                raise ValueError("no whole number under 'step'")
        except ValueError as error:
            if number == len(lines):  # no newline after it: the process was killed while writing
                break
            raise MetricsError(
                f"{path}:{number}: expected a JSON object with a step, got {line[:60]!r} ({error}); "
                "delete that line"
            ) from None
        objects.append(item)
    return objects


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` in order, each `{"step": int, name: number}`.

    `path` is the file or the phase directory that holds it. Non-finite numbers come as floats. A last line
    without a newline that is no whole object (the process was killed while writing) is left out. Raises
    MetricsError, which names file and line, where any other line is damaged or the file cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    return [
        {
            name: _FROM_TEXT.get(value, value) if isinstance(value, str) else value
            for name, value in line.items()
        }
        for line in read_step_log(path)
    ]


class StepLog:
    """A file of JSON lines, each with a `step`, that survives SIGKILL and can go back to a step.

    Every line is handed to the operating system at once. `resume_step=k` keeps the lines of steps up to k
    and drops the rest, by an atomic replacement of the file; `resume_step=None` starts an empty file.
    Used for metrics (one line per step) and for sample responses (several lines per step).
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None) -> None:
        """Open `path` for appending. Raises MetricsError where the kept part is damaged, or WriteError."""
        self.path = Path(path)
        kept: list[dict[str, Any]] = []
        if resume_step is not None and self.path.exists():
            kept = [line for line in read_step_log(self.path) if line["step"] <= resume_step]
        self.last_step: int | None = kept[-1]["step"] if kept else None
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept).encode()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists() or self.path.read_bytes() != text:
                partial = self.path.with_name(self.path.name + ".partial")
                with partial.open("wb") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, self.path)
            # Unbuffered: a line that could not be written is not tried again when the file is closed.
            self._file = self.path.open("ab", buffering=0)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one object; its `step` must not lie before that of the line above (ValueError).

        Raises WriteError if the file cannot take the line.
        """
        step = line["step"]
        if self.last_step is not None and step < self.last_step:
            raise ValueError(f"{self.path}: step {step} comes after step {self.last_step}")
        text = json.dumps({k: _to_json(v) for k, v in line.items()}, ensure_ascii=False, allow_nan=False)
        # A lone surrogate (half an emoji from a sampled token) has no UTF-8 form: written as "?".
        left = memoryview(text.encode("utf-8", errors="replace") + b"\n")
        with writing(self.path):
            while left:  # a disk that is nearly full takes a part first
                left = left[self._file.write(left) :]
        self.last_step = step

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


@dataclass(frozen=True)
class WandbSettings:
    """Where Weights & Biases logs to. Offline use goes by its own WANDB_MODE=offline."""

    project: str
    name: str
    """Name of the run as shown, such as `quickstart/rl`."""
    config: Mapping[str, Any] = field(default_factory=dict)


class MetricsWriter:
    """Writes each step's metrics to `metrics.jsonl` and, if asked, to TensorBoard and Weights & Biases.

    TensorBoard's files go to `phase_dir/tensorboard`; steps that are run again after a resume replace the
    first ones there; if they cannot be written, that is said once and the phase goes on. A Weights & Biases
    run keeps its id in `phase_dir/wandb_id`, so a resumed phase goes on in the same run; it ignores steps
    that it already has, which a deterministic run repeats exactly.
    """

    def __init__(
        self,
        phase_dir: str | os.PathLike[str],
        *,
        resume_step: int | None,
        tensorboard: bool,
        wandb: WandbSettings | None,
    ) -> None:
        """Open the loggers. `resume_step` is the last step to keep; None starts from nothing.

        Raises MetricsError where the file is damaged before that step, or `wandb` is wanted but missing.
        """
        self.phase_dir = Path(phase_dir)
        self._wandb = None if wandb is None else _start_wandb(self.phase_dir, wandb, resume_step)
        self._log = StepLog(self.phase_dir / "metrics.jsonl", resume_step=resume_step)
        purge_step = 0 if resume_step is None else resume_step + 1
        self._tensorboard = (
            TensorBoard(self.phase_dir / "tensorboard", purge_step=purge_step) if tensorboard else None
        )

    @property
    def path(self) -> Path:
        """The JSON lines file."""
        return self._log.path

    @property
    def last_step(self) -> int | None:
        """The last step written, None if there is none yet."""
        return self._log.last_step

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the step's metrics: numbers, or arrays of one element, by name.

        When it returns, the line survives the death of the process; write before the step's checkpoint.
        Raises ValueError if the step isn't after the last one, TypeError if a metric is no number, WriteError
        if metrics.jsonl cannot be written.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"{self.path}: step {step} comes after step {self.last_step}; write a step's metrics once"
            )
        numbers = {name: _as_number(name, value) for name, value in metrics.items()}
        self._log.append({"step": int(step), **numbers})
        if self._tensorboard is not None:
            self._tensorboard.write(step, numbers)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self, *, failed: bool = False) -> None:
        """Close all loggers; `failed` marks a Weights & Biases run as failed. A second call does nothing."""
        self._log.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=1 if failed else 0)
            self._wandb = None

    def __enter__(self) -> MetricsWriter:
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an exception marks the run as failed."""
        self.close(failed=error is not None)


def _start_wandb(phase_dir: Path, settings: WandbSettings, resume_step: int | None) -> Any:
    """A Weights & Biases run, the earlier one if this is a resume. Raises MetricsError if not installed."""
    try:
        module = importlib.import_module("wandb")
    except ImportError as error:
        raise MetricsError(
            f"Weights & Biases is asked for but cannot be imported ({error}): "
            "python3 -m pip install 'vcppo_jax[wandb]', or set logging.wandb=false"
        ) from None
    id_file = phase_dir / "wandb_id"
    if resume_step is None or not id_file.exists():
        with writing(id_file):
            phase_dir.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return module.init(
        project=settings.project,
        name=settings.name,
        id=id_file.read_text(encoding="utf-8").strip(),
        resume="allow",
        dir=str(phase_dir),
        config=dict(settings.config),
    )
