"""The files and models that a configuration names are there before the first phase runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vcppo_jax.config import Config
from vcppo_jax.config_load import ConfigError
from vcppo_jax.phases.artifacts import find_model
from vcppo_jax.phases.workspace import TASK

NETWORKS = {"model.path": "actor", "value_model.path": "critic", "reward.model": "critic"}
"""Keys that name a model -> the network that is meant where it is a run. All other keys name files."""


def check_inputs(config: Config, phases: Sequence[str]) -> None:
    """Raise ConfigError, a line per key, where a file or model that one of `phases` reads does not exist.

    `phases` are those that will run, in their order. What lies in the directory of a phase that runs before
    the one that reads it is not looked for.
    """
    run_dir = Path(config.run_dir).absolute()
    faults: dict[str, None] = {}
    for number, phase in enumerate(phases):
        written = [run_dir / earlier for earlier in phases[:number]]
        for key, name in _read_by(phase, config):
            path = Path(name).absolute()
            if any(path.is_relative_to(directory) or path == run_dir for directory in written):
                continue
            if (fault := _fault(key, name)) is not None:
                faults[f"{key}: {fault}"] = None
    if faults:
        raise ConfigError("\n".join(faults))


def _fault(key: str, name: str) -> str | None:
    """What is wrong with the path that a key names; None where there is something."""
    if key not in NETWORKS:
        return None if Path(name).is_file() else f"{name}: expected a JSONL or parquet file; there is none"
    try:
        find_model(name, NETWORKS[key])
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _read_by(phase: str, config: Config) -> Iterator[tuple[str, str]]:
    """(key, path) of every file and model that the configuration names and the phase reads."""
    data, algorithm, in_rl = config.data, config.algorithm, phase == "rl"
    yield "model.path", config.model.path
    if phase in ("value", "rl", "grade"):
        yield from (("data.train", file) for file in _files(data.train))
    if phase in ("sft", "value", "evaluate") or (in_rl and config.rl.evaluate_every):
        yield from (("data.validation", file) for file in _files(data.validation or ""))
    own_critic = in_rl and algorithm.advantage == "gae" and "value" not in config.phases
    for key, path, is_read in (
        ("sft.data", config.sft.data, phase == "sft" or (in_rl and algorithm.sft_coef > 0)),
        ("reward_model.data", config.reward_model.data, phase == "reward"),
        ("value_model.path", config.value_model.path, phase == "value" or own_critic),
        ("reward.model", config.reward.model, phase == "value" or in_rl),
    ):
        if path is not None and is_read:
            yield key, path


def _files(sources: str) -> list[str]:
    """Of comma-separated files and tasks, the files."""
    return [name.strip() for name in sources.split(",") if name.strip() and not name.startswith(TASK)]
