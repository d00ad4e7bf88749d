"""The file of a study: arms and seeds over a base configuration; each becomes a `Config` of its own.

`load_study` builds and validates all of them before anything runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, StringConstraints, ValidationError, model_validator
from pydantic.fields import FieldInfo

from vcppo_jax.config import Config
from vcppo_jax.config_load import ConfigError, describe_errors, iterate_keys, load_config, read_yaml
from vcppo_jax.config_objective import NonNegative, Section

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
"""Of a stage or an arm: also the name of its directory."""
Settings = dict[str, Any]
_PLACEHOLDER = re.compile(r"^\{([a-z][a-z0-9_]*)\}(?=/|$)")
_CHECKPOINT = re.compile(r"^\{([a-z][a-z0-9_]*)\}/checkpoints/(\d+)$")
_FIGURE_KEYS = {
    "curves": ("arms", "metrics"),
    "positions": ("arms",),
    "reward_decay": ("arms",),
    "value_loss": ("stages", "metrics"),
}
_SET_BY_STUDY = ("run_dir", "seed")


class ArmSection(Section):
    """One arm: what is compared."""

    label: str = Field(description="Name of the arm in tables and figures.")
    settings: Settings = Field({}, description="Keys of the configuration, over the study's settings.")


class TableSection(Section):
    """A table of the page: one row per arm."""

    title: str = Field(description="Heading.")
    claim: str = Field("", description="What the paper says, in a sentence; it stands above the numbers.")
    arms: tuple[Name, ...] = Field(min_length=1, description="Arms, a row each.")


class FigureSection(Section):
    """A figure of the page: one line per arm or stage, with the band of the seeds."""

    kind: Literal["curves", "positions", "reward_decay", "value_loss"] = Field(
        description="curves: metrics of RL over its steps. positions: mean value and advantage by token "
        "position before the first update. reward_decay: measured weight of the last reward by distance to "
        "the end, beside lambda_actor to that power. value_loss: metrics of stages over their steps."
    )
    title: str = Field(description="Heading.")
    claim: str = Field("", description="What the paper says, in a sentence.")
    arms: tuple[Name, ...] = Field((), description="Arms, a line each (not with value_loss).")
    stages: tuple[Name, ...] = Field((), description="Stages, a line each (value_loss only).")
    metrics: tuple[str, ...] = Field((), description="A panel each (curves and value_loss only).")

    @model_validator(mode="after")
    def _combinations(self) -> FigureSection:
        wanted = _FIGURE_KEYS[self.kind]
        for key in ("arms", "stages", "metrics"):
            if (key in wanted) != bool(getattr(self, key)):
                verb = "needs" if key in wanted else "takes no"
                raise ValueError(f"a figure of kind {self.kind} {verb} {key}")
        return self


class Study(Section):
    """A study as its file has it."""

    title: str | None = Field(None, description="Heading of the page; the file's name when null.")
    out_dir: str = Field(description="Directory of all runs of the study and of its page.")
    base: str = Field(description="Configuration that all runs start from, relative to this file.")
    seeds: tuple[NonNegative, ...] = Field(min_length=1, description="Every stage and arm runs once a seed.")
    settings: Settings = Field(
        {}, description="Keys of the configuration over the base, for all stages and arms."
    )
    stages: dict[Name, Settings] = Field(
        {},
        description="Runs that arms start from, in order: name -> keys of the configuration. A string "
        "'{name}', alone or before a slash, stands for the directory of that stage's last phase of the same "
        "seed (evaluate apart).",
    )
    arms: dict[Name, ArmSection] = Field(
        min_length=1, description="Name -> label and settings, which may use '{stage}' too."
    )
    tables: tuple[TableSection, ...] = Field((), description="Tables: title, claim, arms.")
    figures: tuple[FigureSection, ...] = Field(
        (), description="Figures: kind, title, claim, arms or stages, metrics."
    )

    @model_validator(mode="after")
    def _names(self) -> Study:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: each once, got {', '.join(map(str, self.seeds))}")
        shown: list[tuple[str, TableSection | FigureSection]] = []
        shown += [(f"tables.{index}", table) for index, table in enumerate(self.tables)]
        shown += [(f"figures.{index}", figure) for index, figure in enumerate(self.figures)]
        for where, part in shown:
            for kind, known in (("arms", self.arms), ("stages", self.stages)):
                for name in getattr(part, kind, ()):
                    if name not in known:
                        raise ValueError(
                            f"{where}.{kind}: no {kind[:-1]} {name!r} in {part.title!r}; there are "
                            f"{', '.join(known) or 'none'}"
                        )
        return self


@dataclass(frozen=True)
class StudyRun:
    """A stage or an arm with one seed: an ordinary run."""

    kind: Literal["stage", "arm"]
    name: str
    config: Config
    needs: tuple[str, ...]
    """Stages that it starts from."""

    @property
    def seed(self) -> int:
        """The seed."""
        return self.config.seed

    @property
    def run_dir(self) -> Path:
        """Where it runs."""
        return Path(self.config.run_dir)

    def __str__(self) -> str:
        """Such as `arm vcppo seed 1`."""
        return f"{self.kind} {self.name} seed {self.seed}"


@dataclass(frozen=True)
class StudyPlan:
    """A study with the configurations of all its runs, in the order in which they run: seed by seed."""

    file: Path
    study: Study
    runs: tuple[StudyRun, ...]

    @property
    def out_dir(self) -> Path:
        """Directory of the study."""
        return Path(self.study.out_dir)

    @property
    def title(self) -> str:
        """Heading of the page."""
        return self.file.stem if self.study.title is None else self.study.title

    def of(self, kind: str, name: str) -> tuple[StudyRun, ...]:
        """The runs of a stage or an arm, by seed."""
        return tuple(run for run in self.runs if (run.kind, run.name) == (kind, name))


def load_study(path: str | Path) -> StudyPlan:
    """The study of a YAML file, every configuration of it built and validated.

    Configurations lie over each other in this order: `base`, the study's `settings`, the stage's or arm's.
    `settings` may hold `include: [FILE, ...]` (relative to the study's file, as `base`): those files go
    beneath the other keys of the same settings. Raises ConfigError, which names the stage or arm.
    """
    path = Path(path)
    try:
        study = Study.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(describe_errors(error, path, Study)) from None
    runs: list[StudyRun] = []
    for seed in study.seeds:
        stages: dict[str, Config] = {}
        for name, settings in study.stages.items():
            run = _run(path, study, "stage", name, settings, seed, stages)
            stages[name] = run.config
            runs.append(run)
        runs += [
            _run(path, study, "arm", name, arm.settings, seed, stages) for name, arm in study.arms.items()
        ]
    return StudyPlan(path, study, tuple(runs))


def study_keys() -> Iterator[tuple[str, FieldInfo]]:
    """Each key of a study's file, dotted, with its explanation."""
    yield from iterate_keys(Study)
    for prefix, part in (
        ("arms.NAME.", ArmSection),
        ("tables.N.", TableSection),
        ("figures.N.", FigureSection),
    ):
        yield from iterate_keys(part, prefix)


def stage_dir(config: Config) -> Path:
    """What `{stage}` stands for: the directory of the last phase that trains, else of the last phase."""
    trained = [phase for phase in config.phases if phase != "evaluate"]
    return Path(config.run_dir) / (trained or config.phases)[-1]


def _run(
    path: Path,
    study: Study,
    kind: Literal["stage", "arm"],
    name: str,
    settings: Settings,
    seed: int,
    stages: Mapping[str, Config],
) -> StudyRun:
    """A stage or arm with one seed; `stages` are those that it may start from."""
    where = f"{path}: {kind} {name!r}"
    layers = [study.settings, settings]
    for key in _SET_BY_STUDY:
        if any(key in layer for layer in layers):
            raise ConfigError(f"{where}: {key} is set by the study (out_dir, seeds): remove it")
    needs = []
    for text in _strings(layers):
        if match := _PLACEHOLDER.match(text):
            _check_stage(where, text, match[1], study, stages)
            needs.append(match[1])
    directory = Path(study.out_dir) / f"{kind}s" / name / f"seed_{seed}"
    base = path.parent / study.base
    overrides = [word for layer in layers for word in _overrides(path, base, _filled(layer, stages))]
    try:
        config = load_config(base, [*overrides, f"run_dir={_yaml(str(directory))}", f"seed={seed}"])
    except ConfigError as error:
        faults = [line.removeprefix(f"{base}: ") for line in str(error).splitlines()]
        raise ConfigError("\n".join(f"{where}: {fault}" for fault in faults)) from None
    return StudyRun(kind, name, config, tuple(dict.fromkeys(needs)))


def _check_stage(where: str, text: str, name: str, study: Study, stages: Mapping[str, Config]) -> None:
    """ConfigError where `{name}` is no stage that has run by then, or keeps no such checkpoint."""
    if name not in stages:
        state = "a later stage" if name in study.stages else "no stage"
        raise ConfigError(f"{where}: {text!r}: {name!r} is {state}; there are {', '.join(stages) or 'none'}")
    if not (match := _CHECKPOINT.match(text)):
        return
    phase = stage_dir(stages[name]).name
    section = getattr(stages[name], {"reward": "reward_model"}.get(phase, phase))
    if section.steps is None:
        return
    kept = sorted(
        {*(x for x in getattr(section, "checkpoint_steps", ()) if x < section.steps), section.steps}
    )
    if int(match[2]) not in kept:
        raise ConfigError(
            f"{where}: {text!r}: stage {name!r} keeps the checkpoints of steps {', '.join(map(str, kept))}; "
            "more of value-pretraining are kept by value.checkpoint_steps"
        )


def _strings(value: Any) -> Iterator[str]:
    """Every string in nested settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


def _filled(value: Any, stages: Mapping[str, Config]) -> Any:
    """The settings with the directories of stages in the place of their names."""
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda match: str(stage_dir(stages[match[1]])), value)
    if isinstance(value, Mapping):
        return {key: _filled(item, stages) for key, item in value.items()}
    return [_filled(item, stages) for item in value] if isinstance(value, list) else value


def _overrides(path: Path, base: Path, settings: Settings) -> Iterator[str]:
    """The settings as words of the command line, what they include first."""
    include = settings.get("include", [])
    for name in [include] if isinstance(include, str) else include:
        # load_config takes it relative to the base
        yield f"include={_yaml(os.path.relpath(path.parent / name, base.parent))}"
    for key, value in settings.items():
        if key != "include":
            yield f"{key}={_yaml(value)}"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**9)
