"""Is a checkpoint directory what was written? Sizes and checksums of its files, and what to do when not.

Orbax commits a step atomically, but neither it nor TensorStore would notice a byte of the arrays that flips
later (OCDBT checks its index, not the values). So each step carries `_manifest.json`: the size and CRC-32 of
every file, and the metrics of the step. It is written into the step's temporary directory before that is
renamed, so a committed step has one. A step without one (its manifest was lost) counts as intact if Orbax
can read it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

MANIFEST = "_manifest.json"
METADATA = "_CHECKPOINT_METADATA"
# Orbax writes these after the manifest, while it commits; METADATA is checked by parsing it.
_WRITTEN_LATE = frozenset({METADATA, "commit_success.txt"})
_CHUNK_BYTES = 1 << 22
_READERS = 4
_HALF_WRITTEN = re.compile(r"(0|[1-9]\d*)\.orbax-checkpoint-tmp")
_DAMAGED = re.compile(r"(0|[1-9]\d*)\.damaged(-\d+)?$")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message is one line for the user."""


def steps_of(directory: epath.Path) -> list[int]:
    """The committed steps under `directory`, ascending; damaged ones that nobody noticed included."""
    return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(directory))


def half_written(directory: epath.Path) -> dict[int, list[epath.Path]]:
    """Step -> directories that a save left behind when the process died before it was done."""
    return _children(directory, _HALF_WRITTEN)


def set_aside_steps(directory: epath.Path) -> dict[int, list[epath.Path]]:
    """Step -> directories that `set_aside` renamed."""
    return _children(directory, _DAMAGED)


def _children(directory: epath.Path, pattern: re.Pattern[str]) -> dict[int, list[epath.Path]]:
    found: dict[int, list[epath.Path]] = {}
    for child in sorted(directory.iterdir()) if directory.exists() else []:
        if match := pattern.match(child.name):
            found.setdefault(int(match[1]), []).append(child)
    return found


def set_aside(step_directory: epath.Path) -> epath.Path:
    """Renames `20` to `20.damaged` (`20.damaged-2`, ... when taken), where no reader looks; the new path."""
    number = 1
    while True:
        suffix = ".damaged" if number == 1 else f".damaged-{number}"
        target = step_directory.parent / f"{step_directory.name}{suffix}"
        if not target.exists():
            return step_directory.rename(target)
        number += 1


def _files(directory: epath.Path) -> dict[str, epath.Path]:
    """Every file below `directory` that the manifest covers, by its relative path."""
    found: dict[str, epath.Path] = {}
    pending = [(directory, "")]
    while pending:
        parent, prefix = pending.pop()
        for child in parent.iterdir():
            name = prefix + child.name
            if child.is_dir():
                pending.append((child, name + "/"))
            elif name not in _WRITTEN_LATE and not name.startswith(MANIFEST):
                found[name] = child
    return found


def _size_and_checksum(path: epath.Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, checksum


def _body_checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def write_manifest(directory: epath.Path, metrics: Mapping[str, float]) -> None:
    """Writes the manifest of a directory whose files are all there. Raises OSError."""
    files = _files(directory)
    with ThreadPoolExecutor(_READERS) as pool:
        sums = dict(zip(files, pool.map(_size_and_checksum, files.values())))
    body = {"files": {name: list(sums[name]) for name in sorted(sums)}, "metrics": dict(metrics)}
    partial = directory / f"{MANIFEST}.partial"
    partial.write_text(json.dumps({"crc32": _body_checksum(body), "body": body}))
    partial.replace(directory / MANIFEST)


def has_manifest(directory: epath.Path) -> bool:
    """Whether the step can be verified, and not only read."""
    return (directory / MANIFEST).exists()


def _read_manifest(directory: epath.Path) -> dict[str, Any]:
    """The manifest's body. Raises OSError, or ValueError where it is not as it was written."""
    content = json.loads((directory / MANIFEST).read_bytes())
    if not isinstance(content, dict) or content.get("crc32") != _body_checksum(content.get("body")):
        raise ValueError("checksum")
    return content["body"]


def metrics_of(directory: epath.Path) -> dict[str, float]:
    """The metrics saved with a step; empty where there are none or they cannot be read."""
    try:
        return dict(_read_manifest(directory)["metrics"])
    except (OSError, ValueError):
        return {}


def metadata_damage(directory: epath.Path) -> str | None:
    """What is wrong with the file without which Orbax's manager cannot open a step; None if nothing."""
    try:
        content = json.loads((directory / METADATA).read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not an object")
        _ = ocp.path.step.Metadata(step=0, path=directory).commit_timestamp  # parses every field
    except FileNotFoundError:
        return f"{METADATA} is missing"
    except Exception as error:  # Orbax's parser raises what it likes on a field of the wrong type
        return f"{METADATA} cannot be read ({type(error).__name__})"
    return None


def damage(directory: epath.Path, *, below: str = "") -> str | None:
    """What is wrong with a committed step, in a few words, or None if it is as it was written.

    Reads every file, or only those whose relative path starts with `below`. Without a manifest nothing can be
    said, and the answer is None.
    """
    if not has_manifest(directory):
        return None
    try:
        expected = _read_manifest(directory)["files"]
    except (OSError, ValueError):
        return f"{MANIFEST} cannot be read"
    expected = {name: tuple(entry) for name, entry in expected.items() if name.startswith(below)}
    for name, (size, _) in expected.items():
        path = directory / name
        if not path.exists():
            return f"{name} is missing"
        if (found := path.stat().length) != size:
            return f"{name} has {found} bytes instead of {size}"
    with ThreadPoolExecutor(_READERS) as pool:
        sums = pool.map(lambda name: _size_and_checksum(directory / name), expected)
        for (name, entry), found_entry in zip(expected.items(), sums):
            if found_entry != entry:
                return f"{name} has a wrong checksum"
    return None
