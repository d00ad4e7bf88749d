"""`vcppo study`: stages and arms, seed by seed, each an ordinary run; then the page of all.

A finished run is passed over, an interrupted one goes on, one that fails is recorded and the study goes on.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path

from vcppo_jax.config import Config
from vcppo_jax.config_load import ConfigError
from vcppo_jax.config_study import StudyPlan, StudyRun, load_study
from vcppo_jax.phases.loop import Signals, write_json
from vcppo_jax.phases.networks import updates_in
from vcppo_jax.phases.pipeline import finished, run_phases
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.run.processes import from_main, is_main
from vcppo_jax.run.progress import format_duration, write_plain
from vcppo_jax.run.report import read_phase
from vcppo_jax.run.study_charts import StudyFigure, unknown_metric
from vcppo_jax.run.study_report import StudyTable, write_study
from vcppo_jax.run.study_results import STATUS_FILE, Budget, Group, PlannedRun
from vcppo_jax.train.learner import NonFiniteError


def read_study(path: str | Path) -> StudyPlan:
    """`load_study`, the metrics of the figures checked too; ConfigError names the figure."""
    plan = load_study(path)
    for figure in plan.study.figures:
        for name in figure.metrics:
            if fault := unknown_metric(name):
                raise ConfigError(f"{path}: figure {figure.title!r}: {fault}")
    return plan


def run_study(plan: StudyPlan) -> Path:
    """Run what is not finished of a study; the path of its page, written after every arm that ran.

    Raises Interrupted (what was done is saved), and ConfigError at the end where runs began with other
    settings: those are left as they are, the others run.
    """
    signals, begun, refused = Signals(), time.monotonic(), []
    counts, done = Counter(run.kind for run in plan.runs), Counter[str]()
    without_result: set[tuple[str, int]] = set()
    try:
        with signals.handled():
            for run in plan.runs:
                signals.check()
                done[run.kind] += 1
                elapsed = format_duration(time.monotonic() - begun)
                head = f"{run.kind} {done[run.kind]}/{counts[run.kind]} {run.name} seed {run.seed}"
                _say(f"=== {plan.title}: {head} ({elapsed} so far)")
                lacking = [name for name in run.needs if (name, run.seed) in without_result]
                passed_over = from_main(lambda: _is_finished(run))  # noqa: B023  called at once
                status = _run(run, lacking, signals)
                if status == "refused":
                    refused.append(from_main(lambda: _recorded(run))["message"])  # noqa: B023
                if status is not None and run.kind == "stage":
                    without_result.add((run.name, run.seed))
                if run.kind == "arm" and not passed_over:
                    from_main(lambda: write_page(plan))
    finally:
        page = from_main(lambda: write_page(plan))
    if refused:
        raise ConfigError("\n".join(refused))
    return page


def _run(run: StudyRun, lacking: list[str], signals: Signals) -> str | None:
    """Run a stage or an arm as far as it is not finished; None if it is then, else what is recorded of it.

    failed: the numbers were not finite; it would fail again, so it is passed over from then on. refused: it
    began with other settings. skipped: a stage that it starts from has no result.
    """
    file = run.run_dir / STATUS_FILE
    recorded = from_main(lambda: _recorded(run))
    if lacking:
        return _record(run, "skipped", f"stage {lacking[0]} of this seed has no result")
    if recorded.get("status") == "failed":
        _say(f"failed before: {recorded['message']}; remove {file} to try again")
        return "failed"
    from_main(lambda: file.unlink(missing_ok=True))
    try:
        if from_main(lambda: _is_finished(run)):
            workspace = Workspace(run.config)
            for phase in run.config.phases:
                workspace.begin(phase)
            _say(f"finished already in {run.run_dir}")
        else:
            run_phases(run.config, run.config.phases, signals=signals)
            gc.collect()  # the run's programs and states, before the next one makes its own
    except NonFiniteError as error:
        return _record(run, "failed", str(error))
    except ConfigError as error:
        return _record(run, "refused", str(error))
    return None


def _is_finished(run: StudyRun) -> bool:
    return all(finished(run.run_dir / phase) for phase in run.config.phases)


def _record(run: StudyRun, status: str, message: str) -> str:
    def write() -> None:
        run.run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run.run_dir / STATUS_FILE, {"status": status, "message": message})

    from_main(write)
    _say(f"{run} {status}: {message}")
    return status


def _say(text: str) -> None:
    if is_main():
        write_plain(sys.stdout, text)


def _recorded(run: StudyRun) -> dict[str, str]:
    file = run.run_dir / STATUS_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


# The page.


def write_page(plan: StudyPlan) -> Path:
    """Write the page of a study from what its runs have come to; the path of it."""
    study = plan.study
    arms = [_group(plan, "arm", name, arm.label) for name, arm in study.arms.items()]
    stages = [_group(plan, "stage", name, f"stage {name}") for name in study.stages]
    numbered = {group.name: (group, number) for number, group in enumerate(arms)}
    numbered_stages = {group.name: (group, number) for number, group in enumerate(stages)}
    return write_study(
        plan.out_dir,
        title=plan.title,
        arms=arms,
        stages=stages,
        tables=[
            StudyTable(table.title, table.claim, tuple(numbered[name][0] for name in table.arms))
            for table in study.tables
        ],
        figures=[
            StudyFigure(
                figure.kind,
                figure.title,
                figure.claim,
                (
                    *(numbered[name] for name in figure.arms),
                    *(numbered_stages[name] for name in figure.stages),
                ),
                figure.metrics,
            )
            for figure in study.figures
        ],
    )


def _group(plan: StudyPlan, kind: str, name: str, label: str) -> Group:
    runs = [
        PlannedRun(run.seed, run.run_dir, _planned_steps(run.config), _budget(plan, run))
        for run in plan.of(kind, name)
    ]
    return Group(name, label, tuple(runs))


def _planned_steps(config: Config) -> dict[str, int | None]:
    """Phase -> its steps, None where the data or the value model's settling decide."""
    steps: dict[str, int | None] = {
        "sft": config.sft.steps,
        "reward": config.reward_model.steps,
        "value": None if config.value.settle else config.value.steps,
        "rl": config.rl.steps,
        "evaluate": None,
    }
    return {phase: steps[phase] for phase in config.phases}


def _budget(plan: StudyPlan, run: StudyRun) -> Budget:
    config = run.config
    samples = config.rl.prompts_per_step * config.rollout.n
    return Budget(
        samples_per_step=samples,
        updates_per_step=updates_in(1, samples, config.rl.mini_batch_size, config.actor.epochs),
        warmup_steps=config.rl.critic_warmup_steps,
        pretraining_samples=_pretraining_samples(plan, run),
    )


def _pretraining_samples(plan: StudyPlan, run: StudyRun) -> int:
    """Samples of the value-pretraining behind the run's value model, in the run itself or in a stage."""
    config = run.config
    if config.algorithm.advantage != "gae" and run.kind == "arm":
        return 0
    total = 0
    if "value" in config.phases:
        total += _value_steps(run) * config.value.prompts_per_step * config.rollout.n
    path = config.value_model.path
    if config.value_model.init != "checkpoint" or path is None:
        return total
    for other in plan.runs:
        directory = other.run_dir / "value"
        if other.seed == run.seed and Path(path).is_relative_to(directory):
            steps = Path(path).relative_to(directory).parts[1:]
            taken = int(steps[0]) if steps else _value_steps(other)
            total += taken * other.config.value.prompts_per_step * other.config.rollout.n
    return total


def _value_steps(run: StudyRun) -> int:
    """Steps of the run's value-pretraining: fewer than planned where it has settled."""
    return int(read_phase(run.run_dir / "value").summary.get("steps", run.config.value.steps))
