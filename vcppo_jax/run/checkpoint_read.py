"""Reading a checkpoint: whole, or only a part of its state; nothing here writes or renames.

A step that is not as it was written is `Damaged`; an intact one of another state is a `CheckpointMismatch`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vcppo_jax.run.integrity import CheckpointError, damage, has_manifest, steps_of
from vcppo_jax.run.leaves import first_difference, named_leaves, nested, read_leaves, stored_leaves
from vcppo_jax.run.processes import from_main

logger = logging.getLogger(__name__)


class CheckpointMismatch(CheckpointError):
    """An intact checkpoint of another state: a leaf is missing, left over, or of another shape or dtype."""


class Restored(NamedTuple):
    """What a checkpoint holds."""

    step: int
    state: Any
    """The pytree of the abstract state, with its shardings."""
    meta: dict[str, Any]


class Damaged(Exception):
    """A step that is not as it was written; the message says what is wrong, in a few words."""


class _OrbaxLogFilter(logging.Filter):
    """Drops what Orbax logs, since errors are raised again here; slow saves stay visible."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or str(record.msg).startswith("Waiting for previous save")


class _AsyncioLogFilter(logging.Filter):
    """Drops the errors of Orbax's other writes: of a save that fails, only the first one is raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("Task exception was never retrieved") or not record.exc_info:
            return True
        return not any("orbax" in frame.filename for frame in traceback.extract_tb(record.exc_info[2]))


@dataclass
class _UnraisableHook:
    """A `sys.unraisablehook` without TensorStore's complaints that Orbax's loop is closed.

    Writes that end after another one has failed come too late for the loop that waited. The complaint comes
    from C++: no object is named, and the outermost frame is that of the function that TensorStore calls.
    """

    before: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        frames = traceback.extract_tb(unraisable.exc_traceback)
        late = str(unraisable.exc_value) == "Event loop is closed" and unraisable.object is None
        if not late or [frame.name for frame in frames[:1]] != ["call_soon_threadsafe"]:
            self.before(unraisable)


_ORBAX_LOG_FILTER, _ASYNCIO_LOG_FILTER = _OrbaxLogFilter(), _AsyncioLogFilter()


def quiet_orbax() -> None:
    """Silences, for this process, what Orbax and TensorStore print of errors that are raised here again."""
    logging.getLogger("absl").addFilter(_ORBAX_LOG_FILTER)
    logging.getLogger("asyncio").addFilter(_ASYNCIO_LOG_FILTER)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


@contextmanager
def _reading(directory: epath.Path) -> Iterator[None]:
    """Turns what Orbax raises on a step into CheckpointError, or Damaged if its files cannot be verified."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError, CheckpointError):
        raise
    except Exception as error:
        if has_manifest(directory):  # the files are as they were written
            raise CheckpointError(
                f"checkpoints: {directory} is intact but cannot be read: {reason(error)}"
            ) from error
        raise Damaged(reason(error)) from error


def read_step(directory: epath.Path, abstract_state: Any) -> Restored:
    """The checkpoint in a step's directory, with the pytree and the shardings of `abstract_state`.

    Process 0 verifies the files for all; each process reads what its devices need. Raises Damaged,
    CheckpointMismatch, or CheckpointError if Orbax cannot read intact files.
    """
    if (problem := from_main(lambda: damage(directory))) is not None:
        raise Damaged(problem)
    wanted = named_leaves(abstract_state)
    with _reading(directory):
        if (difference := first_difference(stored_leaves(directory / "state"), wanted)) is not None:
            raise CheckpointMismatch(
                f"checkpoints: {directory}: {difference}; resume with the config that wrote it, "
                "or choose a new run directory"
            )
        read = read_leaves(directory / "state", wanted)
        meta = read_meta(directory)
    tree = jax.tree.structure(abstract_state)
    return Restored(int(directory.name), jax.tree.unflatten(tree, list(read.values())), meta)


def read_params(
    path: str | epath.PathLike, abstract: Any = None, *, subtree: str = "actor/params", item: str = "state"
) -> Any:
    """The part `subtree` of a saved state, for example the policy's weights without the optimizer's.

    `path` is a step's directory or one that holds steps, of which the newest intact is read; nothing is
    renamed or written. With `abstract` (leaves as in `Checkpoints.restore_latest`, the pytree that of the
    subtree) it comes back in that pytree with its shardings, else as nested dicts of NumPy arrays. Raises
    CheckpointError if there is nothing to read or it is damaged, CheckpointMismatch if it is not what
    `abstract` says.
    """
    quiet_orbax()
    directory = from_main(lambda: _intact_step(epath.Path(path).absolute(), item))
    try:
        with _reading(directory):
            return _read_subtree(directory, abstract, subtree, item)
    except Damaged as problem:
        raise CheckpointError(f"{directory} is damaged: {problem}") from None


def _read_subtree(directory: epath.Path, abstract: Any, subtree: str, item: str) -> Any:
    stored = stored_leaves(directory / item)
    root = subtree.strip("/")
    # Name below the subtree -> leaf; the name is "" where the subtree is one leaf.
    below = {
        name[len(root) :].lstrip("/"): leaf
        for name, leaf in stored.items()
        if name == root or name.startswith(root + "/")
    }
    if not below:
        depth = root.count("/") + 1
        parts = sorted({"/".join(name.split("/")[:depth]) for name in stored})
        raise CheckpointError(f"{directory}: no {subtree!r} in {item!r}; there are {parts}")
    if abstract is None:
        wanted = {name: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for name, leaf in below.items()}
    else:
        wanted = named_leaves(abstract)
    if (difference := first_difference(below, wanted)) is not None:
        raise CheckpointMismatch(f"{directory}: {subtree}: {difference}")
    full = {name: f"{root}/{name}".rstrip("/") for name in wanted}
    read = read_leaves(directory / item, {full[name]: leaf for name, leaf in wanted.items()})
    if abstract is not None:
        return jax.tree.unflatten(jax.tree.structure(abstract), list(read.values()))
    return read[root] if "" in below else nested({name: read[full[name]] for name in wanted})


def _intact_step(path: epath.Path, item: str) -> epath.Path:
    """The step's directory to read for `path`. Raises CheckpointError."""
    candidates = [path] if (path / item).exists() else [path / str(s) for s in reversed(steps_of(path))]
    if not candidates:
        raise CheckpointError(
            f"{path}: no checkpoint here; expected a step's directory or one that holds steps"
        )
    problems = []
    for directory in candidates:
        if (problem := damage(directory)) is None:
            return directory
        problems.append(f"{directory.name}: {problem}")
        logger.warning("checkpoint %s is damaged (%s) and passed over", directory, problem)
    raise CheckpointError(f"{path}: no intact checkpoint here ({'; '.join(problems)})")


def read_meta(directory: epath.Path) -> dict[str, Any]:
    """The `meta` of the step in `directory`."""
    return ocp.JsonCheckpointHandler().restore(directory / "meta")


def newest_meta(path: str | epath.PathLike) -> dict[str, Any]:
    """The `meta` of a step's directory, or of the newest intact step in a directory that holds steps.

    Raises CheckpointError as `read_params` does.
    """
    quiet_orbax()
    return from_main(lambda: read_meta(_intact_step(epath.Path(path).absolute(), "state")))


def reason(error: BaseException) -> str:
    """The cause of an error in a few words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore's spelling
        return os.strerror(int(code[1]))
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first_line if len(first_line) <= 300 else first_line[:300] + "..."
