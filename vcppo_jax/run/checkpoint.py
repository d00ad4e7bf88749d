"""Checkpoints of a run: written by Orbax in the background, verified when read, never lost.

One directory per step: `<step>/state` (the arrays, as in `leaves.py`), `<step>/meta` (JSON) and
`<step>/_manifest.json` (`integrity.py`). A step appears under its name at once and whole, so a process that
is killed at any moment leaves the steps before it, and at most a half-written temporary directory.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from vcppo_jax.run.checkpoint_read import (
    CheckpointMismatch,
    Damaged,
    Restored,
    quiet_orbax,
    read_meta,
    read_params,
    read_step,
    reason,
)
from vcppo_jax.run.integrity import (
    CheckpointError,
    damage,
    half_written,
    metadata_damage,
    metrics_of,
    set_aside,
    set_aside_steps,
    steps_of,
    write_manifest,
)
from vcppo_jax.run.leaves import check_arrays, named_leaves, nested, with_elements
from vcppo_jax.run.processes import from_main, gather, is_main

logger = logging.getLogger(__name__)

_DELETED = "_deleted"

__all__ = ["CheckpointError", "CheckpointMismatch", "Checkpoints", "Restored", "read_params"]


@dataclass
class _KeepBest(policies.PreservationPolicy):
    """Preserves the step that has the best metric among those that there are."""

    checkpoints: Checkpoints

    def should_preserve(
        self, checkpoints: Sequence[policies.PolicyCheckpointInfo], *, context: policies.PreservationContext
    ) -> Sequence[bool]:
        """One flag per checkpoint."""
        best = self.checkpoints._best([info.step for info in checkpoints])
        return [info.step == best for info in checkpoints]


class Checkpoints:
    """The checkpoints of one run, in one directory. Use it as a context manager, or call `close`.

    After each save the last `keep_last` steps stay, those in `keep_steps`, and, with `keep_best_metric`, the
    one whose `metrics[keep_best_metric]` is the largest (`keep_best_mode` "max") or smallest ("min"); a step
    without that metric, or with NaN, is never the best. Other steps are deleted once the new one is safe.

    One job at a time writes a directory; `read_params` reads it from any other. Of a job of many processes
    all call every method, at the same point: each writes and reads what its devices hold, and process 0 does
    the rest, deletions and names included.
    Raises CheckpointError if the directory cannot be written, ValueError on a wrong argument.
    """

    def __init__(
        self,
        directory: str | epath.PathLike,
        *,
        keep_last: int,
        keep_best_metric: str | None = None,
        keep_best_mode: str = "max",
        keep_steps: Sequence[int] = (),
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"checkpoints: keep_last must be at least 1, got {keep_last}")
        if keep_best_mode not in ("max", "min"):
            raise ValueError(f"checkpoints: keep_best_mode is 'max' or 'min', got {keep_best_mode!r}")
        quiet_orbax()
        self.directory = epath.Path(directory).absolute()
        self._best_metric, self._best_mode = keep_best_metric, keep_best_mode
        self._saving: tuple[int, dict[str, float]] | None = None
        self._current: int | None = None
        self._unopenable: list[int] = []
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="checkpoint_deleter")
        self._metrics = from_main(self._prepare_directory)
        kept: list[policies.PreservationPolicy] = [
            policies.LatestN(keep_last),
            policies.CustomSteps(tuple(keep_steps)),
        ]
        if keep_best_metric is not None:
            kept.append(_KeepBest(self))
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(kept),
                # A step is renamed first and deleted after, so that none is ever found half deleted.
                todelete_subdir=_DELETED,
                # Called when every file of the step is written, before the step gets its name.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
            ),
        )

    def _prepare_directory(self) -> dict[int, dict[str, float]]:
        """Makes the directory, proves that it can be written, and sets aside steps that Orbax cannot open.

        The metrics of those that are left.
        """
        probe = self.directory / ".write-probe"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_text("?")
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"checkpoints: cannot write to {self.directory}: {error.strerror or error}; "
                "choose a directory that can be written, or make room"
            ) from error
        self._empty_deleted()
        for step in self.steps():
            if (problem := metadata_damage(self.directory / str(step))) is not None:
                target = set_aside(self.directory / str(step))
                logger.warning("checkpoint %d is damaged (%s); kept as %s", step, problem, target)
                self._unopenable.append(step)
        return {step: metrics_of(self.directory / str(step)) for step in self.steps()}

    def _empty_deleted(self) -> None:
        """Deletes the steps that are no longer kept, in the background."""
        for old in (
            list((self.directory / _DELETED).iterdir()) if (self.directory / _DELETED).exists() else []
        ):
            self._deleter.submit(shutil.rmtree, old, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)  # the error that ends the run comes first

    def steps(self) -> list[int]:
        """The steps on disk, ascending; one that is still being written is not among them."""
        return steps_of(self.directory)

    def best_step(self) -> int | None:
        """The step on disk with the best metric, or None if none has the metric."""
        self.wait()
        return self._best(self.steps())

    def _best(self, steps: Sequence[int]) -> int | None:
        if self._best_metric is None:
            return None
        sign = 1.0 if self._best_mode == "max" else -1.0
        scores = {step: sign * self._metrics.get(step, {}).get(self._best_metric, math.nan) for step in steps}
        scores = {step: score for step, score in scores.items() if not math.isnan(score)}
        return max(scores, key=lambda step: (scores[step], step)) if scores else None

    def save(
        self, step: int, state: Any, meta: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Starts to save `state` (pytree of arrays) and `meta` (JSON) as `step`, and returns.

        The values are those of now: the caller may donate the buffers right away. If the save before is
        still running, it is waited for, and its failure is raised here. False, with nothing done, if `step`
        is what this object saved or restored last. Raises CheckpointError if the step is on disk already or
        cannot be written, TypeError or ValueError if state or meta cannot be stored.
        """
        self.wait()
        if step == self._current:
            return False
        if is_main() and step in self.steps():
            raise CheckpointError(
                f"checkpoints: {self.directory / str(step)} is there already and is not overwritten; "
                "move it away, or resume from the newest step"
            )
        meta = _as_json(meta)
        named = named_leaves(state)
        check_arrays(named)
        # A donation on the host's own memory is safe too: Orbax holds NumPy views of the buffers, and XLA
        # copies instead of donating a buffer that is held (tests/test_checkpoint.py watches over that).
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(nested(with_elements(named))), meta=ocp.args.JsonSave(meta)
        )
        values = {name: float(value) for name, value in (metrics or {}).items()}
        self._metrics[step] = values
        self._saving = (step, values)
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:  # whatever the file system or the writer raised
            raise self._save_failed(step, error) from error
        return True

    def _write_manifest(self) -> None:
        """In the thread that saves. Also right should Orbax call it after it has renamed the directory."""
        assert self._saving is not None
        step, metrics = self._saving
        for directory in [*half_written(self.directory).get(step, []), self.directory / str(step)]:
            if directory.exists():
                write_manifest(directory, metrics)
                return

    def _save_failed(self, step: int, error: BaseException) -> CheckpointError:
        self._saving = None
        self._metrics.pop(step, None)
        self._manager.reload()
        kept = ", ".join(map(str, self.steps())) or "none"
        return CheckpointError(
            f"checkpoints: step {step} could not be saved to {self.directory}: {reason(error)}; steps saved "
            f"before are untouched ({kept}). Make room or repair the path, then run again to resume"
        )

    def wait(self) -> None:
        """Returns when the running save, if any, is on disk. Raises CheckpointError if it failed."""
        if self._saving is None:
            return
        step = self._saving[0]
        try:
            self._manager.wait_until_finished()
            if is_main() and step not in self.steps():
                raise OSError("the writer ended without an error, but the step is not there")
        except Exception as error:
            raise self._save_failed(step, error) from error
        self._saving, self._current = None, step
        if is_main():
            self._empty_deleted()

    def close(self) -> None:
        """Waits for the running save and for deletions. Raises CheckpointError if the save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._deleter.shutdown()

    def restore_latest(self, abstract_state: Any) -> Restored | None:
        """The newest intact checkpoint, or None if there has never been one.

        `abstract_state` is the state's pytree with leaves that have shape and dtype: one with a `sharding`
        (jax.ShapeDtypeStruct, jax.Array) is read to that sharding, whatever mesh wrote it. Damaged steps are
        passed over with a warning and set aside as `<step>.damaged`; half-written ones are removed.
        Raises CheckpointError if all steps are damaged (they stay as they are), CheckpointMismatch if the
        newest intact one holds another state.
        """
        self.wait()
        damaged: dict[int, str] = {}
        restored = None
        for step in reversed(from_main(self.steps)):
            problem = None
            try:
                restored = read_step(self.directory / str(step), abstract_state)
            except Damaged as found:
                problem = str(found)
            problems = [found for found in gather(problem) if found is not None]
            if not problems:
                break
            damaged[step], restored = problems[0], None
        from_main(lambda: self._tidy_up(damaged, None if restored is None else restored.step))
        for step in damaged:
            self._metrics.pop(step, None)
        self._manager.reload()
        self._current = None if restored is None else restored.step
        return restored

    def _tidy_up(self, damaged: Mapping[int, str], used_step: int | None) -> None:
        """Sets aside what is damaged, removes what is half written. CheckpointError if all are damaged."""
        if used_step is None and (damaged or set_aside_steps(self.directory)):
            listed = [f"{step}: {problem}" for step, problem in damaged.items()] + [
                f"{path.name}: set aside earlier"
                for paths in set_aside_steps(self.directory).values()
                for path in paths
            ]
            raise CheckpointError(
                f"checkpoints: none in {self.directory} is intact ({'; '.join(listed)}); "
                "put back an intact one, or move the directory away to start from the beginning"
            )
        used = "starting from the beginning" if used_step is None else f"using step {used_step}"
        for step, problem in damaged.items():
            target = set_aside(self.directory / str(step))
            logger.warning("checkpoint %d is damaged (%s); kept as %s; %s", step, problem, target, used)
        if self._unopenable:
            logger.warning("instead of damaged checkpoints %s: %s", self._unopenable, used)
            self._unopenable.clear()
        for step, paths in half_written(self.directory).items():
            logger.warning("checkpoint %d in %s was only half written; %s", step, self.directory, used)
            for path in paths:
                path.rmtree()

    def restore(self, step: int, abstract_state: Any) -> Restored:
        """The checkpoint of `step`, as `restore_latest` reads it.

        Raises CheckpointError if there is none or it is damaged, CheckpointMismatch if it is another state's.
        """
        self._require(step)
        try:
            restored = read_step(self.directory / str(step), abstract_state)
        except Damaged as problem:
            raise CheckpointError(
                f"checkpoints: {self.directory / str(step)} is damaged: {problem}"
            ) from None
        self._current = step
        return restored

    def restore_meta(self, step: int) -> dict[str, Any]:
        """Only the `meta` of `step`. Raises CheckpointError if there is none or it is damaged."""
        self._require(step)
        directory = self.directory / str(step)
        if (problem := damage(directory, below="meta/")) is not None:
            raise CheckpointError(f"checkpoints: {directory} is damaged: {problem}")
        return read_meta(directory)

    def _require(self, step: int) -> None:
        self.wait()
        if step not in (steps := self.steps()):
            raise CheckpointError(
                f"checkpoints: no step {step} in {self.directory}; there are {steps or 'none'}"
            )


def _as_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `meta` that JSON gives back unchanged. Raises TypeError that names what is none."""

    def check(value: Any, where: str) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"checkpoint {where}: expected keys that are strings, got {key!r}")
                check(part, f"{where}[{key!r}]")
        elif isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                check(part, f"{where}[{index}]")
        elif value is not None and not isinstance(value, (str, int, float)):
            raise TypeError(f"checkpoint {where}: expected a JSON value, got {type(value).__name__}")

    check(meta, "meta")
    return json.loads(json.dumps(meta))
