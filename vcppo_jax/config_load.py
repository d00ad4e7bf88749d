"""Reads YAML files and `key.sub=value` words into a validated `Config`, and back.

Errors come out as one line each that names the file, the key, what was expected and what came.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from vcppo_jax.config import PHASES, Config


class ConfigError(ValueError):
    """A key, value or combination that the configuration does not allow; the message is for the user."""


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping; merged ones (`<<`) may hold the same keys."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands here twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def iterate_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf key, dotted, with its pydantic FieldInfo, in the order of the file."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from iterate_keys(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def nearest_key(key: str, model: type[BaseModel] = Config) -> str | None:
    """The known dotted key of `model` that looks most like `key`; None where none does.

    First one of the same section, then one with the same last part, then one with a similar last part: of
    several the one in the most similar section.
    """
    known = [name for name, _ in iterate_keys(model)]
    section, _, leaf = key.rpartition(".")

    def likeness(name: str) -> tuple[bool, bool, float]:
        other_section, _, other_leaf = name.rpartition(".")
        total = _ratio(leaf, other_leaf) + _ratio(section, other_section)
        return section == other_section, leaf == other_leaf, total

    near = [name for name in known if _ratio(leaf, name.rpartition(".")[2]) >= 0.6]
    if near:
        return max(near, key=likeness)
    # `rollout_n` for `rollout.n`
    whole = difflib.get_close_matches(key, known, n=1, cutoff=0.8) if not section else []
    return whole[0] if whole else None


def _ratio(one: str, other: str) -> float:
    """How alike two words are, from 0 to 1."""
    return difflib.SequenceMatcher(None, one, other).ratio()


def _unknown_keys(key: str, value: Any, model: type[BaseModel]) -> Iterator[str]:
    """A line for `key`, which `model` does not have, or for each key below it where `value` is a mapping."""
    near = nearest_key(key, model)
    section = key.rpartition(".")[0]
    beside = near is not None and near.rpartition(".")[0] == section
    if isinstance(value, Mapping) and value and not beside:
        for name, item in value.items():
            yield from _unknown_keys(f"{key}.{name}", item, model)
        return
    known = [name.rpartition(".")[::2] for name, _ in iterate_keys(model)]
    leaves = [other_leaf for other, other_leaf in known if other == section]
    sections = dict.fromkeys(other.partition(".")[0] for other, _ in known if other)
    hint = ""
    if near is not None:
        hint = f"; did you mean {near!r}?"
    elif section and leaves:
        hint = f"; {section} has {', '.join(leaves)}"
    elif section and sections:
        hint = f"; the sections are {', '.join(sections)}"
    yield f"unknown key {key!r}{hint}"


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            value = _merge(merged[key], value)
        merged[key] = value
    return merged


def read_yaml(path: Path, stack: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file's mapping over that of the files it includes (`include: [a.yaml]`, relative to it)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot read the configuration: {reason}") from None
    try:
        data = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, got {type(data).__name__}")
    if path.resolve() in stack:
        raise ConfigError(f"{path}: includes itself")
    return _apply_includes(data, path, (*stack, path.resolve()))


def _apply_includes(data: dict[str, Any], path: Path, stack: tuple[Path, ...] = ()) -> dict[str, Any]:
    include = data.pop("include", [])
    names = [include] if isinstance(include, str) else include
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: include: expected a file or a list of files, got {include!r}")
    base: dict[str, Any] = {}
    for name in names:
        try:
            base = _merge(base, read_yaml(path.parent / name, stack))
        except ConfigError as error:
            raise ConfigError(f"{path}: include: {error}") from None
    return _merge(base, data)


def _parse_override(text: str, path: Path) -> dict[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: expected key.sub=value")
    try:
        value = yaml.safe_load(raw) if raw else None
    except yaml.YAMLError:
        value = raw
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return _apply_includes(nested, path) if key == "include" else nested


def describe_errors(error: ValidationError, path: Path, model: type[BaseModel] = Config) -> str:
    """One line per fault that pydantic found in the file's keys."""
    lines: list[str] = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines += _unknown_keys(key, item["input"], model)
        elif item["type"] == "missing":
            lines.append(f"{key}: is required; set it in the file or with {key}=VALUE")
        elif item["type"] == "value_error":
            text = str(item["ctx"]["error"])
            named = not key or text.startswith((f"{key}.", f"{key}:"))
            lines.append(text if named else f"{key}: {text}")
        else:
            lines.append(f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}")
    return "\n".join(f"{path}: {line}" for line in lines)


def load_config(path: str | Path, overrides: Sequence[str] = (), *, phase: str | None = None) -> Config:
    """The validated configuration of a YAML file, also for running `phase` alone, if one is given.

    `include: [FILE, ...]` in the file puts those files beneath it; overrides (`key.sub=value`, the value
    read as YAML; `include=FILE` merges a file) go over it in their order. Raises ConfigError, one line per
    fault.
    """
    path = Path(path)
    data = read_yaml(path)
    for text in overrides:
        data = _merge(data, _parse_override(text, path))
    try:
        config = Config.model_validate(data)
        if phase is not None and phase not in config.phases:
            # What is asked for must make sense too, whatever `vcppo run` would do.
            together = sorted({*config.phases, phase}, key=PHASES.index)
            Config.model_validate(data | {"phases": together})
        return config
    except ValidationError as error:
        raise ConfigError(describe_errors(error, path)) from None


def dump_config(config: Config) -> str:
    """The configuration as YAML, every key spelled out; `load_config` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
