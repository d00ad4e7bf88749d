"""`vcppo plan` itself: reads its options, plans or searches, prints and writes the result."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from vcppo_jax.aot.topology import topology
from vcppo_jax.config import Config
from vcppo_jax.config_load import ConfigError, load_config
from vcppo_jax.phases.plan import PARTS, Lengths, StepPrograms
from vcppo_jax.phases.plan_report import plan_json, plan_page
from vcppo_jax.phases.plan_search import search, search_page
from vcppo_jax.run.files import writing


def run_plan(args: argparse.Namespace) -> int:
    """The exit status: 0 where the plan (or one that the search found) fits, else 1."""
    config = load_config(args.config, args.overrides, phase="rl")
    lengths, parts = _lengths(config, args), _parts(args.parts)
    described = topology(args.topology)
    command = _command(args)
    if args.search:
        found = search(config, described, lengths, _say)
        page = search_page(found, command)
        numbers: Any = [candidate.as_json() for candidate in found]
        fits = any(candidate.plan is not None and candidate.plan.fits for candidate in found)
    else:
        plan = StepPrograms(config, described, lengths).plan(parts, _say)
        title = f"{Path(args.config).stem} on {described.name}"
        page, numbers, fits = plan_page(plan, command, title), plan_json(plan, command), plan.fits
    print(page)
    if args.markdown:
        _write(args.markdown, page)
    if args.json:
        _write(args.json, json.dumps(numbers, indent=1) + "\n")
    return 0 if fits else 1


def _say(line: str) -> None:
    print(f"plan: {line}", file=sys.stderr, flush=True)


def _write(file: str, text: str) -> None:
    with writing(Path(file)):
        Path(file).write_text(text, encoding="utf-8")


def _command(args: argparse.Namespace) -> str:
    """The command line without the files that it writes."""
    words = ["vcppo", "plan", args.config, *args.overrides, "--topology", args.topology]
    words += ["--search"] if args.search else []
    for name in ("parts", "response_tokens", "prompt_tokens"):
        value = getattr(args, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _parts(names: str | None) -> tuple[str, ...]:
    if names is None:
        return tuple(PARTS)
    chosen = tuple(names.split(","))
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        raise ConfigError(f"--parts: expected some of {','.join(PARTS)}, got {unknown[0]!r}")
    return chosen


def _lengths(config: Config, args: argparse.Namespace) -> Lengths:
    limits = {"prompt": config.data.max_prompt_tokens, "response": config.rollout.max_new_tokens}
    chosen = {}
    for name, limit in limits.items():
        value = getattr(args, f"{name}_tokens")
        if value is not None and not 1 <= value <= limit:
            raise ConfigError(
                f"--{name}-tokens: expected a number from 1 to {limit}, the limit of the configuration, "
                f"got {value}"
            )
        chosen[name] = limit if value is None else value
    return Lengths(**chosen)
