"""The `vcppo` command. Heavy imports happen after the command line has been understood."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vcppo_jax.phases.loop import Interrupted

COMMANDS = {
    "run": "all phases that the config lists, in order; picks up where it stopped",
    "sft": "cold start: imitate demonstrations",
    "reward": "reward model: learn from pairs which of two responses is the better",
    "value": "value-pretraining: train the value model alone, the policy frozen",
    "rl": "reinforcement learning: VC-PPO and the algorithms of configs/algorithms",
    "evaluate": "evaluate on held-out problems",
    "study": "several arms and seeds, and one page of them; picks up where it stopped",
    "export": "write a trained model as a Hugging Face directory",
    "report": "write the report page of a run again",
    "plan": "what a run's programs take on hardware that need not be here: memory, time, what bounds it",
}
SECTIONS = {
    "sft": (
        *(
            "model",
            "mesh",
            "data",
            "rollout",
            "sft",
            "train",
            "evaluate",
            "verifier",
            "checkpoint",
            "logging",
        ),
    ),
    "reward": ("model", "mesh", "data", "rollout", "reward_model", "train", "checkpoint", "logging"),
    "evaluate": ("model", "mesh", "data", "rollout", "evaluate", "grade", "verifier", "logging"),
    "value": (
        *("model", "value_model", "mesh", "data", "rollout", "reward", "algorithm", "critic"),
        *("value", "train", "verifier", "checkpoint", "logging"),
    ),
    "rl": (
        *("model", "value_model", "mesh", "data", "rollout", "reward", "algorithm", "actor", "critic", "rl"),
        *("sft", "train", "evaluate", "verifier", "checkpoint", "logging"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 for a user's error, 128 + signal when interrupted.

    Of a job of many processes: 75 where another process was lost.
    """
    args = parse(arguments)
    command = {"export": _export, "study": _study, "plan": _plan}.get(args.command, _dispatch)
    try:
        return _joined(command, args) if getattr(args, "distributed", False) else command(_alone(args))
    except BaseException as error:
        status, line = _failure(error)
        if line is None:
            raise
        if line:
            print(f"vcppo: {line}", file=sys.stderr)
        return status


def _failure(error: BaseException) -> tuple[int, str | None]:
    """(exit status, line for the user) of what ended a command; None for the line calls for a traceback."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141, ""
    if not isinstance(error, Exception) or not _is_users(error) or os.environ.get("VCPPO_TRACEBACK"):
        return 1, None
    return 1, _message(error)


def _alone(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of a lone process; ConfigError where the environment says that it is one of many."""
    from vcppo_jax.run.peers import VARIABLES

    if hasattr(args, "distributed") and (set_ := [name for name in VARIABLES if os.environ.get(name)]):
        from vcppo_jax.config_load import ConfigError

        raise ConfigError(
            f"{', '.join(set_)} is set, so this is one of several processes, but --distributed is not given; "
            "add it, or unset what is set"
        )
    return args


def _joined(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command as one of the processes of a job, all of which end when one of them fails."""
    _configure_jax()
    from jax.errors import JaxRuntimeError

    from vcppo_jax.run.peers import JoinError, exit_now, join

    try:
        job = join(timeout_s=args.join_timeout)
    except JoinError as error:
        print(f"vcppo: {error}", file=sys.stderr)
        exit_now(1)  # JAX would wait for the others first
    try:
        status = command(args)
    except BaseException as error:
        if isinstance(error, JaxRuntimeError):
            job.await_news()
        status, line = _failure(error)
        if line is None:
            traceback.print_exc()
            line = f"{type(error).__name__}: {error}".splitlines()[0]
        elif line:
            print(f"vcppo: process {job.index}: {line}", file=sys.stderr)
        job.fail(line, status)
    job.leave()
    return status


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with overrides before and behind options alike (argparse alone takes one place)."""
    parser = build_parser()
    args, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar and help."""
    parser = argparse.ArgumentParser(
        prog="vcppo",
        description="Value-Calibrated PPO for reasoning models, in JAX.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_LazyKeys("run"),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=_LazyKeys(name) if name in SECTIONS or name in ("run", "study") else None,
        )
        if name not in ("export", "report", "plan"):
            _add_distributed(command)
        if name == "export":
            command.add_argument("run", metavar="RUN", help="a run, a phase of it, or PHASE/checkpoints/STEP")
            command.add_argument("out", metavar="OUT", help="new directory")
            command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
            command.add_argument("--value-model", action="store_true", help="export the value model instead")
        elif name == "report":
            command.add_argument("run", metavar="RUN", help="directory of the run")
        elif name == "study":
            command.add_argument("studies", metavar="STUDY", nargs="+", help="YAML file of a study")
            command.add_argument(
                "--page", action="store_true", help="write the page from what is there; run nothing"
            )
        else:
            if name == "evaluate":
                command.add_argument(
                    "--grade",
                    action="store_true",
                    help="instead, split the training prompts into easy, medium and hard by their pass rate",
                )
            if name == "plan":
                _add_plan_options(command)
            command.add_argument("config", metavar="CONFIG", help="YAML file")
            command.add_argument(
                "overrides",
                metavar="key.sub=value",
                nargs="*",
                help="goes over the file; include=FILE merges one",
            )
    return parser


def _add_plan_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--topology",
        required=True,
        metavar="NAME",
        help="v5p:4x4x4, v5e:8x8, v6e:8x8 (chips), h100:4x8, h200:1x8 (hosts x GPUs), cpu:8 (to try it out)",
    )
    command.add_argument(
        "--search",
        action="store_true",
        help="try meshes, rows per micro-batch and remat policies, and rank those that fit",
    )
    command.add_argument("--parts", metavar="A,B", help="only these parts of a step (see docs/plan.md)")
    command.add_argument(
        "--response-tokens", type=int, metavar="N", help="mean length for the times; the limit by default"
    )
    command.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="mean length for the times; the limit by default"
    )
    command.add_argument("--json", metavar="FILE", help="write the plan as JSON")
    command.add_argument("--markdown", metavar="FILE", help="write the page to a file, too")


def _add_distributed(command: argparse.ArgumentParser) -> None:
    """The options of one process of many."""
    command.add_argument(
        "--distributed",
        action="store_true",
        help="join the other processes of this job; which one this is comes from JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or from the cluster (TPU pod, Slurm, Open MPI)",
    )
    command.add_argument(
        "--join-timeout",
        type=int,
        default=300,
        metavar="SECONDS",
        help="how long to wait for the other processes (default 300)",
    )


class _LazyKeys(str):
    """The explanation of the keys, made only when the help is printed: it needs the configuration."""

    def __new__(cls, command: str) -> _LazyKeys:
        self = super().__new__(cls, "keys")
        self._command = command  # type: ignore[attr-defined]
        return self

    def __mod__(self, values: object) -> str:
        return describe_keys(self._command)  # type: ignore[attr-defined]

    def __contains__(self, item: object) -> bool:
        return item == "%(prog)"


def describe_keys(command: str) -> str:
    """Every key that a phase reads, with its type, default and explanation."""
    from pydantic_core import PydanticUndefined

    from vcppo_jax.config_load import iterate_keys

    if command == "study":
        from vcppo_jax.config_study import study_keys

        lines, keys = ["keys of a study's file:", ""], study_keys()
    else:
        lines, keys = (
            ["keys of the configuration (set in the file, or as key.sub=value):", ""],
            iterate_keys(),
        )
    for key, field in keys:
        section = key.partition(".")[0]
        if "." in key and command in SECTIONS and section not in SECTIONS[command]:
            continue
        required = field.default is PydanticUndefined
        default = "required" if required else f"default {_shown(field.default)}"
        lines.append(f"  {key}  ({default})")
        lines += textwrap.wrap(
            field.description or "", 92, initial_indent="      ", subsequent_indent="      "
        )
    return "\n".join(lines)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _dispatch(args: argparse.Namespace) -> int:
    if args.command == "report":
        from vcppo_jax.run.report import write_report

        print(f"report: {write_report(args.run)}")
        return 0
    from vcppo_jax.config_load import load_config

    config = load_config(args.config, args.overrides, phase=None if args.command == "run" else args.command)
    _configure_jax()
    from vcppo_jax.phases.loop import Interrupted
    from vcppo_jax.phases.pipeline import run_phases

    phases: tuple[str, ...] = config.phases if args.command == "run" else (args.command,)
    if args.command == "evaluate" and args.grade:
        phases = ("grade",)
    try:
        report = run_phases(config, phases, again=phases if args.command == "evaluate" else ())
    except Interrupted as interrupted:
        return _interrupted(interrupted)
    if _is_main():
        print(f"report: {report}")
    return 0


def _is_main() -> bool:
    from vcppo_jax.run.processes import is_main

    return is_main()


def _study(args: argparse.Namespace) -> int:
    _configure_jax()
    from vcppo_jax.phases.loop import Interrupted
    from vcppo_jax.phases.study import read_study, run_study, write_page
    from vcppo_jax.run.processes import from_main

    plans = [read_study(file) for file in args.studies]  # all of them are right before the first one runs
    for plan in plans:
        try:
            page = from_main(lambda: write_page(plan)) if args.page else run_study(plan)  # noqa: B023
        except Interrupted as interrupted:
            return _interrupted(interrupted)
        if _is_main():
            print(f"page: {page}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    # Compiling for described devices needs no attached one, and should not take it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    kind, _, count = args.topology.partition(":")
    flags = os.environ.get("XLA_FLAGS", "")
    if kind == "cpu" and count.isdigit() and "host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}"
    from vcppo_jax.phases.plan_command import run_plan

    return run_plan(args)


def _interrupted(interrupted: Interrupted) -> int:
    """The exit status; where nobody has told the user yet, between the runs of a study, a line."""
    if not interrupted.said and _is_main():
        print(f"vcppo: {interrupted}: interrupted; the same command goes on", file=sys.stderr)
    return 128 + interrupted.signum


def _export(args: argparse.Namespace) -> int:
    _configure_jax()
    from vcppo_jax.phases.artifacts import export

    network = "critic" if args.value_model else "actor"
    print(f"exported: {export(args.run, args.out, dtype=args.dtype, network=network)}")
    return 0


def _configure_jax() -> None:
    """Keep compiled programs between runs, where the user has not chosen a place for them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import jax

    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vcppo_jax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))


def _is_users(error: Exception) -> bool:
    """Whether the message alone tells the user what to do; anything else keeps its traceback."""
    from vcppo_jax.config_load import ConfigError

    if isinstance(error, ConfigError | OSError):
        return True
    module, name = type(error).__module__, type(error).__name__
    if module.startswith("vcppo_jax."):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_by = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return name in ("ValueError", "ImportError") and raised_by.startswith("vcppo_jax.")


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        files = [str(file) for file in (error.filename, error.filename2) if file is not None]
        return f"{' -> '.join(files)}: {error.strerror}" if files else error.strerror
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
