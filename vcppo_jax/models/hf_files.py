"""A Hugging Face checkpoint directory, read strictly and slice by slice.

Only safetensors are read. Files are memory-mapped: opening a checkpoint reads headers, and a slice
reads its own bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Tensors that a checkpoint may hold beyond the model's weights.
ROTARY_BUFFER = re.compile(r"\.rotary_emb\.inv_freq$")
"""Old versions of transformers saved this buffer; it follows from config.json and is computed there."""


class CheckpointError(ValueError):
    """A checkpoint that is not what config.json promises; the message is one line for the user."""


def check_directory(path: Path) -> None:
    """Raise CheckpointError unless `path` is a directory with config.json and safetensors in it."""
    if not path.is_dir():
        state = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {state}; expected a Hugging Face directory with config.json and *.safetensors"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: no config.json; expected a Hugging Face directory")
    if (path / SINGLE).is_file() or (path / INDEX).is_file():
        return
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    torch_files = sorted(file.name for file in path.glob("*.bin"))
    if shards:
        found = f"found {shards[0]}, but neither {SINGLE} nor {INDEX}; copy the missing file"
    elif torch_files:
        found = (
            f"found only PyTorch files ({torch_files[0]}), which can run code when read; convert them with "
            "transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    else:
        found = f"found no weights; expected {SINGLE} or {INDEX}"
    raise CheckpointError(f"{path}: {found}")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises CheckpointError with file and line if it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CheckpointError(f"{file}{line}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def some(names: Collection[str], limit: int = 4) -> str:
    """The first names, sorted, and how many more there are."""
    first = ", ".join(sorted(names)[:limit])
    return first if len(names) <= limit else f"{first} and {len(names) - limit} more"


class CheckpointFiles:
    """The tensors of a checkpoint directory by name; a context manager that closes the files.

    Raises CheckpointError when a file is missing or damaged, or when the index and the files disagree.
    """

    def __init__(self, path: Path) -> None:
        check_directory(path)
        self.path = path
        self._open_files = ExitStack()
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        try:
            if (path / SINGLE).is_file():  # first, as in transformers
                self._file_of = {name: SINGLE for name in self._open(SINGLE)}
            else:
                self._read_index()
        except BaseException:
            self._open_files.close()
            raise

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()
        self._open_files.close()

    def _open(self, file_name: str) -> list[str]:
        """Names of the tensors in one file, which stays open."""
        file = self.path / file_name
        try:
            handle = self._open_files.enter_context(safe_open(file, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file}: not a complete safetensors file ({error}); copy or download it again"
            ) from error
        self._handles[file_name] = handle
        return list(handle.keys())

    def _read_index(self) -> None:
        index_file = self.path / INDEX
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_file}: expected a 'weight_map' of tensor names to file names")
        self._file_of = {str(name): str(file) for name, file in weight_map.items()}
        files = sorted(set(self._file_of.values()))
        absent = [file for file in files if not (self.path / file).is_file()]
        if absent:
            needing = [name for name, file in self._file_of.items() if file == absent[0]]
            raise CheckpointError(
                f"{self.path}: missing shard {some(absent)} ({len(absent)} of {len(files)} files), which "
                f"holds {some(needing, 1)}; copy or download it again"
            )
        for file in files:
            inside = set(self._open(file))
            listed = {name for name, where in self._file_of.items() if where == file}
            if listed - inside:
                raise CheckpointError(
                    f"{self.path / file}: missing tensor {some(listed - inside)}, which {INDEX} places there"
                )
            if inside - listed:
                raise CheckpointError(
                    f"{self.path / file}: left-over tensor {some(inside - listed)}, which {INDEX} does not "
                    "list there"
                )

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def where(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.path / self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored. Raises CheckpointError if the tensor is of no dtype that we read."""
        view = self._handles[self._file_of[name]].get_slice(name)
        if view.get_dtype() not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.where(name)}: tensor {name} has dtype {view.get_dtype()}, expected one of "
                f"{', '.join(FLOAT_DTYPES)}; a quantised checkpoint must be dequantised first"
            )
        return tuple(view.get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """One slice of a tensor, in the file's dtype (bfloat16, float16 or float32); `index` has its rank."""
        return self._handles[self._file_of[name]].get_slice(name)[index]


def check_names(
    files: CheckpointFiles, expected: Mapping[str, tuple[int, ...]], harmless: Mapping[str, str]
) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly the `expected` tensors in these shapes.

    `harmless` maps the names of tensors that may be left over to the reason; the rotary buffers of old
    checkpoints always may.
    """
    missing = expected.keys() - files.names
    left_over = {
        name for name in files.names - expected.keys() - harmless.keys() if not ROTARY_BUFFER.search(name)
    }
    problems = []
    if missing:
        problems.append(f"missing tensor {some(missing)} (the first of shape {list(expected[min(missing)])})")
    if left_over:
        problems.append(
            f"left-over tensor {some(left_over)} (the first in {files.where(min(left_over)).name})"
        )
    if problems:
        raise CheckpointError(
            f"{files.path}: {'; '.join(problems)}; config.json and the weights are not of one model"
        )
    for name, shape in expected.items():
        found = files.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{files.where(name)}: tensor {name} has shape {list(found)}, expected {list(shape)} from "
                "config.json; config.json and the weights are not of one model"
            )
