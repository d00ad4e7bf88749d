"""Where the time of a run's steps went: stages of each phase, their seconds and shares.

    python benchmarks/stages.py RUN_DIR

Reads `timing_s/*` in RUN_DIR/<phase>/metrics.jsonl, so it needs no device and no model. The stages of a step
are a timeline, one after the other; `other` is what they leave of the step. The first step of a phase, which
compiles, is in a column of its own and not in the share and the median. The time between steps (checkpoints,
logs) and around phases (reading data, the first evaluation) is not in it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common import print_table, spread

from vcppo_jax.run.metrics import read_metrics
from vcppo_jax.run.report import timing

PHASES = ("sft", "reward", "value", "rl")


def rows_of(phase: str, steps: list[dict[str, float]]) -> list[list[str]]:
    """A row for each stage of a phase by falling time, then one for the whole step."""
    first, rest = steps[0], steps[1:] or steps
    total, stages = timing(rest)

    def row(name: str, seconds: float, share: float) -> list[str]:
        numbers = [seconds_in(step, name) for step in rest]
        return [
            phase,
            name,
            f"{seconds_in(first, name):.2f}",
            f"{seconds:.2f}",
            f"{share:.1%}",
            spread([1000 * number for number in numbers], 1),
        ]

    return [row(stage.name, stage.seconds, stage.share) for stage in stages] + [row("step", total, 1.0)]


def seconds_in(step: dict[str, float], stage: str) -> float:
    """Seconds of a stage in a step; 0 where the step had none."""
    if stage != "other":
        return step.get(f"timing_s/{stage}", 0.0)
    named = sum(v for k, v in step.items() if k.startswith("timing_s/") and k != "timing_s/step")
    return step["timing_s/step"] - named


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="of `vcppo run`")
    args = parser.parse_args(argv)
    rows: list[list[str]] = []
    for phase in PHASES:
        if not (args.run_dir / phase / "metrics.jsonl").is_file():
            continue
        steps = [row for row in read_metrics(args.run_dir / phase) if "timing_s/step" in row]
        rows += rows_of(phase, steps) if steps else []
    if not rows:
        print(
            f"{args.run_dir}: expected a run's directory, with rl/metrics.jsonl or another phase's; "
            "found none with timing_s/step",
            file=sys.stderr,
        )
        return 1
    head = ["phase", "stage", "first step, s", "others, s", "share", "ms a step: median (min-max)"]
    print_table(head, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
