"""The host loop that every training phase runs in: steps, metrics, checkpoints, resume, signals.

A phase gives a function from one step's state to the next. Everything that a later step depends on is in
the state (arrays) and in `meta` (JSON), so a phase that is killed and resumed ends where it would have.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from vcppo_jax.config import CheckpointSection, LoggingSection
from vcppo_jax.run.checkpoint import Checkpoints
from vcppo_jax.run.files import writing
from vcppo_jax.run.metrics import MetricsWriter, StepLog, WandbSettings
from vcppo_jax.run.processes import from_main, is_main, largest
from vcppo_jax.run.progress import Progress

Meta = dict[str, Any]
Metrics = dict[str, Any]


class Interrupted(Exception):
    """SIGINT or SIGTERM came; the state of the last finished step is saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.said = False
        """Whether the user has been told."""


class Signals:
    """Turns the first SIGINT or SIGTERM into a flag that is read where the state is whole.

    A second SIGINT is a KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self._pending: int | None = None

    def check(self) -> None:
        """Raise Interrupted if a signal came, to whichever process."""
        if pending := largest(self._pending or 0):
            raise Interrupted(pending)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._pending is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._pending = signum

    @contextmanager
    def handled(self) -> Iterator[Signals]:
        """Handle the signals in the block; outside the main thread, where Python forbids it, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class Timer:
    """Seconds per stage of a step, under verl's names `timing_s/*`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the block's time to `stage`."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def metrics(self) -> Metrics:
        """`timing_s/<stage>`, and `timing_s/step` since the timer was made."""
        stages = {f"timing_s/{stage}": seconds for stage, seconds in self.seconds.items()}
        return stages | {"timing_s/step": time.perf_counter() - self._start}


@dataclasses.dataclass
class StepResult:
    """What a step hands to the loop."""

    state: Any
    meta: Meta
    metrics: Metrics
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_metric: float | None = None
    """By which the best checkpoint is chosen."""
    stop: bool = False
    """Whether the phase ends here."""


class _Writers(NamedTuple):
    metrics: MetricsWriter
    samples: StepLog


@dataclasses.dataclass
class PhaseLoop:
    """One phase's loop in `phase_dir`."""

    phase: str
    phase_dir: Path
    total_steps: int
    checkpoint: CheckpointSection
    logging: LoggingSection
    progress: Progress
    signals: Signals
    run_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The whole configuration, which Weights & Biases shows."""
    best_mode: str = "max"
    keep_steps: tuple[int, ...] = ()
    before: Callable[[Any], tuple[Metrics, list[dict[str, Any]]]] | None = None
    """Metrics and samples of the state before the first step, logged as step 0."""

    def run(
        self,
        initial: Callable[[], Any],
        abstract_state: Any,
        step_function: Callable[[int, Any, Meta], StepResult],
    ) -> tuple[Any, Meta, int]:
        """(state, meta, steps done) at the end: from the newest intact checkpoint, or from `initial()`.

        `step_function(step, state, meta)` runs step `step` (from 1). Raises Interrupted after saving.
        """
        keep_best = "best" if self.checkpoint.keep_best else None
        with Checkpoints(
            self.phase_dir / "checkpoints",
            keep_last=self.checkpoint.keep_last,
            keep_best_metric=keep_best,
            keep_best_mode=self.best_mode,
            keep_steps=self.keep_steps,
        ) as checkpoints:
            restored = checkpoints.restore_latest(abstract_state)
            if restored is None:
                state, meta, done = initial(), {}, 0
            else:
                state, meta, done = restored.state, restored.meta, restored.step
                self.progress.message(f"{self.phase}: resumed after step {done}")
            resume_step = None if restored is None else done
            with self._writers(resume_step) as writers:
                self.progress.start(self.phase, self.total_steps, done)
                starts = done == 0 and from_main(lambda: writers is None or writers.metrics.last_step is None)
                if self.before is not None and starts:
                    self._log(writers, 0, *self.before(state))
                return self._steps(checkpoints, writers, state, meta, done, step_function)

    @contextmanager
    def _writers(self, resume_step: int | None) -> Iterator[_Writers | None]:
        """Those of process 0; None in the others."""
        if not is_main():
            yield None
            return
        wandb = None
        if self.logging.wandb:
            name = f"{self.phase_dir.parent.name}/{self.phase}"
            wandb = WandbSettings(self.logging.wandb_project, name, self.run_config)
        samples = StepLog(self.phase_dir / "samples.jsonl", resume_step=resume_step)
        try:
            with MetricsWriter(
                self.phase_dir, resume_step=resume_step, tensorboard=self.logging.tensorboard, wandb=wandb
            ) as metrics:
                yield _Writers(metrics, samples)
        finally:
            samples.close()

    def _log(self, writers: _Writers | None, step: int, row: Metrics, samples: list[dict[str, Any]]) -> None:
        if writers is None:
            return
        for sample in samples:
            writers.samples.append({"step": step, **sample})
        writers.metrics.write(step, row)
        self.progress.update(step, row)

    def _steps(
        self,
        checkpoints: Checkpoints,
        writers: _Writers | None,
        state: Any,
        meta: Meta,
        done: int,
        step_function: Callable[[int, Any, Meta], StepResult],
    ) -> tuple[Any, Meta, int]:
        stopped, best = bool(meta.get("stopped")), None
        try:
            while done < self.total_steps and not stopped:
                self.signals.check()
                result = step_function(done + 1, state, meta)
                done, stopped, best = done + 1, result.stop, result.best_metric
                state, meta = result.state, result.meta | ({"stopped": True} if result.stop else {})
                # Before the checkpoint: a kill in between repeats the step and drops its line.
                self._log(writers, done, result.metrics, result.samples)
                last = stopped or done == self.total_steps
                if last or done % self.checkpoint.every == 0 or done in self.keep_steps:
                    self._save(checkpoints, done, state, meta, best)
        except Interrupted as interrupted:
            self._save(checkpoints, done, state, meta, best)
            checkpoints.wait()
            self.progress.message(
                f"{self.phase}: {interrupted}: step {done} is saved in {self.phase_dir}; "
                "the same command goes on"
            )
            interrupted.said = True
            raise
        return state, meta, done

    def _save(self, checkpoints: Checkpoints, step: int, state: Any, meta: Meta, best: float | None) -> None:
        checkpoints.save(step, state, meta, None if best is None else {"best": best})


def write_whole(file: Path, text: str) -> None:
    """Write a file so that a reader, and a run after a kill, sees the old one or the whole new one.

    Process 0 writes it; the others do nothing, and do not wait. Raises WriteError.
    """
    if not is_main():
        return
    temporary = file.with_suffix(".tmp")
    with writing(file):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)


def write_json(file: Path, value: Any) -> None:
    """Write JSON as `write_whole` does."""
    write_whole(file, json.dumps(value, indent=1) + "\n")


def mean_infos(infos: list[dict[str, float]], prefix: str) -> Metrics:
    """Each info's mean over the step's updates, under `prefix`; counts of skipped updates are summed."""
    names = [name for name in infos[0] if name not in ("loss", "skipped_in_row", "skipped")]
    means: Metrics = {f"{prefix}{name}": float(np.mean([info[name] for info in infos])) for name in names}
    return means | {f"{prefix}skipped_updates": sum(info["skipped"] for info in infos)}
