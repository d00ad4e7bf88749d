"""`vcppo evaluate --grade`: the training prompts by how often the policy solves them.

The phase directory `grade` holds grades.jsonl, a line per prompt, and easy.jsonl, medium.jsonl, hard.jsonl,
any of which can be the `data.train` of another run.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from vcppo_jax.config import GradeSection
from vcppo_jax.data.prompts import PromptRecord
from vcppo_jax.phases.collect import collect, rollout_sampling
from vcppo_jax.phases.evaluate import last_policy
from vcppo_jax.phases.loop import Timer, write_json, write_whole
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.run.metrics import StepLog, read_step_log
from vcppo_jax.run.processes import from_main, is_main

BANDS = ("easy", "medium", "hard")
PROMPTS_PER_STEP = 64
"""Prompts between two lines of progress; an interrupted grading goes on after the last whole step."""


def band(pass_rate: float, section: GradeSection) -> str:
    """One of `BANDS`."""
    if pass_rate >= section.easy_from:
        return "easy"
    return "hard" if pass_rate <= section.hard_to else "medium"


def run(workspace: Workspace) -> None:
    """Grade every training prompt with the run's last policy, sampled as in RL, and split them into bands."""
    config, section = workspace.config, workspace.config.grade
    phase_dir = workspace.begin("grade")
    policy, name = last_policy(workspace)
    records = workspace.records("train")
    sampling = dataclasses.replace(rollout_sampling(workspace.config), n=section.samples_per_prompt)
    file = phase_dir / "grades.jsonl"
    done = from_main(lambda: _steps_done(phase_dir, file, workspace.run_dir / name / "checkpoints", name))
    log = StepLog(file, resume_step=done) if is_main() else None
    total = -(-len(records) // PROMPTS_PER_STEP)
    workspace.progress.start("grade", total, done)
    try:
        for step in range(done + 1, total + 1):
            workspace.signals.check()
            chunk = records[(step - 1) * PROMPTS_PER_STEP : step * PROMPTS_PER_STEP]
            rollout = collect(
                workspace,
                policy,
                chunk,
                sampling=sampling,
                key=workspace.key("grade", step),
                timer=Timer(),
                interruptible=True,
            )
            rates = (rollout.scores.reshape(-1, sampling.n) > 0).mean(axis=1)
            for record, rate in zip(chunk, rates.tolist()):
                if log is not None:
                    log.append({"step": step, **_row(record), "pass_rate": rate, "band": band(rate, section)})
            workspace.progress.update(step, {"critic/acc/mean": float(rates.mean())})
    finally:
        if log is not None:
            log.close()
    lines = from_main(lambda: read_step_log(file))
    for name_of_band in BANDS:
        rows = [line for line in lines if line["band"] == name_of_band]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_whole(phase_dir / f"{name_of_band}.jsonl", text)
    counts = {b: sum(line["band"] == b for line in lines) for b in BANDS}
    rate = float(np.mean([line["pass_rate"] for line in lines]))
    split = ", ".join(f"{count} {b}" for b, count in counts.items())
    workspace.progress.message(f"grade: {split}; mean pass rate {rate:.1%}; a file of each in {phase_dir}")
    summary = {"policy": name, "seed": config.seed, "pass_rate/mean": rate}
    workspace.finish("grade", summary | {f"prompts/{b}": count for b, count in counts.items()})


def _steps_done(phase_dir: Path, file: Path, checkpoints: Path, policy: str) -> int:
    """Steps of an interrupted grading that are whole; the phase's directory is made ready to go on from them.

    A finished grading, or one of another policy, starts anew; of any other one the last step may be half
    written.
    """
    steps = sorted(int(step.name) for step in checkpoints.glob("*") if step.name.isdigit())
    source = {"policy": policy, "step": steps[-1] if steps else None}
    before = phase_dir / "policy.json"
    same = before.is_file() and json.loads(before.read_text(encoding="utf-8")) == source
    write_json(before, source)
    done = 0
    if same and file.is_file() and not (phase_dir / "summary.json").is_file():
        done = max(0, max((line["step"] for line in read_step_log(file)), default=0) - 1)
    (phase_dir / "summary.json").unlink(missing_ok=True)
    return done


def _row(record: PromptRecord) -> dict[str, Any]:
    prompt = record.prompt if isinstance(record.prompt, str) else list(record.prompt)
    return {"prompt": prompt, "answer": record.answer, "source": record.source}
