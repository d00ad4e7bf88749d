"""What all phases of a run share: config, mesh, directories, tokenizer, data, verifier, progress."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import yaml
from jax.sharding import Mesh

from vcppo_jax.config import Config
from vcppo_jax.config_checks import GYM
from vcppo_jax.config_load import ConfigError, dump_config
from vcppo_jax.data.packing import PackShape
from vcppo_jax.data.prompts import (
    LoadReport,
    PreferencePair,
    PromptRecord,
    SFTExample,
    preference_pairs,
    prompt_records,
    sft_examples,
    task_rows,
)
from vcppo_jax.data.records import Row, read_rows
from vcppo_jax.data.tasks import (
    TASKS,
    Problem,
    demonstrations,
    preferences,
    problems,
    reasoning_gym_problems,
)
from vcppo_jax.data.tokenizer import eos_ids, load_tokenizer, pad_id
from vcppo_jax.models.attention import check_platform
from vcppo_jax.models.config import model_config
from vcppo_jax.models.networks import Policy
from vcppo_jax.models.specs import init_params, weight_specs
from vcppo_jax.phases.artifacts import find_model, load_policy, with_all_eos
from vcppo_jax.phases.loop import Interrupted, PhaseLoop, Signals, write_json, write_whole
from vcppo_jax.phases.shapes import packed_shape
from vcppo_jax.rewards.pool import VerifierPool
from vcppo_jax.run.files import writing
from vcppo_jax.run.metrics import read_step_log
from vcppo_jax.run.processes import from_main, is_main
from vcppo_jax.run.progress import Progress, Warnings
from vcppo_jax.sharding import make_mesh, rollout_mesh

TASK = "task:"

# What each phase's results depend on: sections or keys that must stay as they are while it is unfinished.
_CRITIC = ("value_model", "reward", "algorithm.gamma", "algorithm.value_clip", "algorithm.value_aggregation")
COMPARED: dict[str, tuple[str, ...]] = {
    "sft": ("seed", "model", "data", "sft", "rollout.max_new_tokens"),
    "reward": ("seed", "model", "data", "reward_model", "rollout.max_new_tokens"),
    "value": ("seed", "model", "data", "rollout", "value", "critic", *_CRITIC),
    "rl": ("seed", "model", "data", "rollout", "rl", "critic", "actor", "algorithm", *_CRITIC),
    "grade": ("seed", "model", "data", "rollout", "grade"),
    "evaluate": (),  # it always evaluates again
}
NEVER_COMPARED = {"data.validation", "model.remat", "model.attention", "rl.evaluate_every"}
STARTS_FROM = {"reward": ("sft",), "value": ("sft",), "rl": ("sft", "value")}
"""Phases of the run that a phase starts from where `phases` lists them."""


def changed_settings(phase: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Dotted keys in which two configurations (as plain dicts) differ that `phase` depends on."""
    wanted = COMPARED[phase]
    if phase == "rl" and ours["algorithm"]["sft_coef"] > 0:
        wanted = (*wanted, "sft.data")  # its demonstrations are mixed into the updates
    one, other = _flat(ours), _flat(theirs)
    changed = [
        key
        for key in one
        if any(key == name or key.startswith(f"{name}.") for name in wanted)
        and key not in NEVER_COMPARED
        and one[key] != other.get(key)
    ]
    start = STARTS_FROM.get(phase, ())
    if [name in ours["phases"] for name in start] != [name in theirs["phases"] for name in start]:
        changed.append(f"phases (which of {', '.join(start)} it starts from)")
    return changed


def _has_results(phase: str, directory: Path) -> bool:
    """Whether the phase has done a step, or saved where it starts; a finished grading starts anew."""
    if (directory / "summary.json").is_file():
        return phase != "grade"
    logs = (directory / name for name in ("metrics.jsonl", "grades.jsonl"))
    if any(line["step"] > 0 for log in logs if log.is_file() for line in read_step_log(log)):
        return True
    return any(step.name.isdigit() for step in (directory / "checkpoints").glob("*"))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class Workspace:
    """A run under way; a context manager that sets the mesh and ends the helpers."""

    def __init__(self, config: Config, signals: Signals | None = None) -> None:
        """`signals` are those of a study, which has to stop with the run; None makes the run's own."""
        self.config = config
        self.run_dir = Path(config.run_dir)
        self.mesh: Mesh = make_mesh(config.mesh.sizes)
        self.rollout_mesh = rollout_mesh(self.mesh, config.mesh.decode_tensor)
        """The same devices, divided for generation."""
        check_platform(config.model.attention, self.mesh.devices.flat[0].platform)
        self.signals = Signals() if signals is None else signals
        self.progress = Progress(None if is_main() else open(os.devnull, "w"))  # noqa: SIM115
        self.verifier = VerifierPool(config.verifier.workers)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = "there is a file of that name" if self.run_dir.is_file() else error.strerror
            raise ConfigError(
                f"run_dir={self.run_dir}: expected a directory that is there or can be made, but {problem}; "
                "choose another run_dir"
            ) from None
        if is_main():
            self._stack.enter_context(Warnings(self.progress))
        self._stack.enter_context(self.verifier)
        self._stack.enter_context(self.progress)
        self._stack.enter_context(self.signals.handled())
        self._stack.enter_context(jax.set_mesh(self.mesh))
        self.verifier.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Interrupted) and not error.said:
            where = f"{self.progress.phase}: {error}" if self.progress.phase else str(error)
            self.progress.message(f"{where}: interrupted; the same command goes on")
            error.said = True
        self._stack.__exit__(kind, error, trace)

    # Randomness and shapes.

    def key(self, *names: str | int) -> jax.Array:
        """The key for a purpose, such as ("rl", "rollout", step)."""
        key = jax.random.key(self.config.seed)
        for name in names:
            number = name if isinstance(name, int) else zlib.crc32(name.encode())
            key = jax.random.fold_in(key, number)
        return key

    def shape_for(self, max_response_tokens: int, sequences: int) -> PackShape:
        """The packed shape for so many sequences."""
        return packed_shape(self.config, self.mesh, max_response_tokens, sequences)

    # Phases.

    def phase_dir(self, phase: str) -> Path:
        """The phase's directory, made if it is not there."""
        directory = self.run_dir / phase
        with writing(directory):
            directory.mkdir(exist_ok=True)
        return directory

    def begin(self, phase: str) -> Path:
        """The directory of a phase that starts or goes on; ConfigError if it began with other settings."""
        directory = self.phase_dir(phase)
        from_main(lambda: self._begin(phase, directory))
        return directory

    def _begin(self, phase: str, directory: Path) -> None:
        ours = self.config.model_dump(mode="json")
        file = directory / "config.yaml"
        # A phase that came to nothing (a file could not be read) holds nobody to its settings.
        if file.is_file() and _has_results(phase, directory):
            theirs = yaml.safe_load(file.read_text(encoding="utf-8"))
            changed = changed_settings(phase, ours, theirs)
            if changed:
                raise ConfigError(
                    f"{directory} began with other settings of {', '.join(changed)}; restore them "
                    "to go on, or choose another run_dir"
                )
        for target in (file, self.run_dir / "config.yaml"):
            write_whole(target, dump_config(self.config))

    def loop(self, phase: str, total_steps: int, **options: Any) -> PhaseLoop:
        """The host loop of a phase."""
        return PhaseLoop(
            phase=phase,
            phase_dir=self.phase_dir(phase),
            total_steps=total_steps,
            checkpoint=self.config.checkpoint,
            logging=self.config.logging,
            progress=self.progress,
            signals=self.signals,
            run_config=self.config.model_dump(mode="json"),
            **options,
        )

    def finish(self, phase: str, summary: dict[str, Any]) -> None:
        """Mark a phase as finished, with what it came to."""
        file = self.phase_dir(phase) / "summary.json"
        from_main(lambda: write_json(file, {"finished": True, **summary}))  # the next phase may look for it

    # Models and data.

    @functools.cached_property
    def model_dir(self) -> Path:
        """Directory of the policy's config.json and tokenizer."""
        return find_model(self.config.model.path).model_dir

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return load_tokenizer(self.model_dir)

    @functools.cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """All ids that end a response."""
        return eos_ids(self.model_dir, self.tokenizer)

    @property
    def pad_id(self) -> int:
        """The id that fills up rows."""
        return pad_id(self.tokenizer)

    def base_policy(self) -> Policy:
        """The policy of `model.path`, or a new one of that architecture."""
        model = self.config.model
        if model.init == "pretrained":
            return self.load_policy(model.path)
        config = model_config(
            self.model_dir, compute_dtype=model.compute_dtype, remat=model.remat, attention=model.attention
        )
        layout = self.config.mesh.layout.actor
        params = init_params(weight_specs(config, head="lm"), self.key("model"), self.mesh, layout=layout)
        return Policy(params, with_all_eos(config, self.model_dir))

    def starting_policy(self) -> Policy:
        """The policy that value-pretraining and RL start from: the sft phase's where `phases` has one."""
        if "sft" not in self.config.phases:
            return self.base_policy()
        directory = self.run_dir / "sft"
        if not from_main((directory / "summary.json").is_file):
            raise ConfigError(
                f"phases lists sft, but {directory} holds no finished cold start; run `vcppo sft` with this "
                "config first, or set phases without sft"
            )
        return self.load_policy(directory)

    def load_policy(self, path: str | Path) -> Policy:
        """The policy at `path` (see `artifacts.load_policy`) as config.model says, in the actor's layout."""
        model = self.config.model
        return load_policy(
            path,
            compute_dtype=model.compute_dtype,
            remat=model.remat,
            attention=model.attention,
            mesh=self.mesh,
            layout=self.config.mesh.layout.actor,
        )

    @property
    def has_validation(self) -> bool:
        """Whether there are held-out problems."""
        return self.config.data.train.startswith(TASK) or self.config.data.validation is not None

    def rows(self, split: str) -> list[tuple[str, list[Row]]]:
        """(name, rows) of each source of "train" or "validation"."""
        data = self.config.data
        sources = data.train if split == "train" else data.validation
        if sources is None and data.train.startswith(TASK):
            sources = data.train
        found = []
        for source in (sources or "").split(","):
            if source.startswith(TASK):
                name = source.removeprefix(TASK)
                found.append((name, task_rows(self._problems(name, split), source=name)))
            elif source:
                found.append((source.strip(), read_rows(source.strip())))
        return found

    def _problems(self, name: str, split: str) -> list[Problem]:
        section, seed = self.config.data.task, self.config.seed
        if name.startswith(GYM):
            # One draw for both splits, for it has no question twice.
            train, held_out = section.train_problems, section.validation_problems
            drawn = reasoning_gym_problems(name.removeprefix(GYM), train + held_out, seed=seed)
            return drawn[:train] if split == "train" else drawn[train:]
        count = section.train_problems if split == "train" else section.validation_problems
        return problems(self.task(name), count, seed=seed, split=split)  # type: ignore[arg-type]

    def task(self, name: str) -> Any:
        """The built-in task of this name."""
        section = self.config.data.task
        size = {"running_sum": "digits", "alternating_sum": "additions"}[name]
        return TASKS[name](
            getattr(section, size),
            early_exit_hazard=section.early_exit_hazard,
            step_error_rate=section.step_error_rate,
        )

    def records(self, split: str) -> list[PromptRecord]:
        """The prompts of a split; what was dropped is reported."""
        kept: list[PromptRecord] = []
        for name, rows in self.rows(split):
            records, report = prompt_records(
                rows,
                self.tokenizer,
                name=name,
                max_prompt_tokens=self.config.data.max_prompt_tokens,
                system_prompt=self.config.data.system_prompt,
            )
            self._report(report)
            kept += records
        return kept

    def demonstrations(self) -> list[SFTExample]:
        """The cold start's demonstrations."""

        def of_task(name: str) -> list[Row]:
            made = demonstrations(
                self.task(name), self.config.data.task.demonstrations, seed=self.config.seed
            )
            return task_rows([p for p, _ in made], source=name, responses=[r for _, r in made])

        name, rows = self._training_rows("sft.data", self.config.sft.data, of_task)
        examples, report = sft_examples(rows, self.tokenizer, name=name, **self._limits())
        self._report(report)
        return examples

    def pairs(self) -> list[PreferencePair]:
        """The reward model's pairs; the built-in task has one for each training problem."""

        def of_task(name: str) -> list[Row]:
            count = self.config.data.task.train_problems
            made = preferences(self.task(name), count, seed=self.config.seed)
            return task_rows([pair.problem for pair in made], source=name, pairs=[pair[1:] for pair in made])

        name, rows = self._training_rows("reward_model.data", self.config.reward_model.data, of_task)
        pairs, report = preference_pairs(rows, self.tokenizer, name=name, **self._limits())
        self._report(report)
        return pairs

    def _training_rows(
        self, key: str, file: str | None, of_task: Callable[[str], list[Row]]
    ) -> tuple[str, list[Row]]:
        """(name, rows) of the file that the key names, else what the built-in task writes."""
        if file is not None:
            return file, read_rows(file)
        name = self.config.data.train.removeprefix(TASK)
        if name not in TASKS:
            raise ConfigError(f"{key}: expected a file; data.train={self.config.data.train} writes none")
        return name, of_task(name)

    def _limits(self) -> dict[str, Any]:
        data = self.config.data
        return {
            "max_prompt_tokens": data.max_prompt_tokens,
            "max_response_tokens": self.config.rollout.max_new_tokens,
            "system_prompt": data.system_prompt,
        }

    def _report(self, report: LoadReport) -> None:
        self.progress.message(str(report))
