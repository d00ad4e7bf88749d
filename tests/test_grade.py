"""`vcppo evaluate --grade`: pass rates, bands and their files, and what a second grading goes on from."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest
from tiny_run import on_one_device, tiny_config

from vcppo_jax.config import GradeSection
from vcppo_jax.phases import collect, grade
from vcppo_jax.phases.loop import Interrupted
from vcppo_jax.phases.pipeline import run_phases
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.rewards.score import Verdict

PROMPTS, SAMPLES, PER_STEP = 10, 4, 4  # two whole steps and a short one
SETTINGS = (
    f"data.task.train_problems={PROMPTS}",
    f"grade.samples_per_prompt={SAMPLES}",
    "rollout.max_new_tokens=2",
    "rollout.batch_size=8",  # one shape for the short step too
    "phases=[rl]",
)
GRADED = [*grade.BANDS, "grades"]


class Collect:
    """Of the samples of a prompt with answer a, a modulo 5 are right; a signal comes with call `stop_at`."""

    def __init__(self, stop_at=None):
        self.calls, self.stop_at = [], stop_at

    def __call__(self, workspace, policy, records, **kwargs):
        self.calls.append(len(records))
        rollout = collect.collect(workspace, policy, records, **kwargs)
        if len(self.calls) == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        verdicts = [
            Verdict(1.0, "correct") if row % SAMPLES < int(record.answer) % 5 else Verdict(-1.0, "wrong")
            for row, record in enumerate(rollout.records)
        ]
        return dataclasses.replace(rollout, judge=lambda: verdicts)


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """Grade with the settings; returns what has counted the prompts of each step."""
    on_one_device(monkeypatch)
    monkeypatch.setattr(grade, "PROMPTS_PER_STEP", PER_STEP)
    monkeypatch.setattr("vcppo_jax.rewards.pool.VerifierPool.start", lambda self: None)
    monkeypatch.setattr("vcppo_jax.phases.pipeline.write_report", lambda run_dir: run_dir)

    def run(*words, stop_at=None):
        counted = Collect(stop_at)
        monkeypatch.setattr(grade, "collect", counted)
        config = tiny_config(tmp_path, *SETTINGS, *words)
        if stop_at is None:
            run_phases(config, ("grade",), again=("grade",))
        else:
            with pytest.raises(Interrupted):
                run_phases(config, ("grade",), again=("grade",))
        return counted

    return run


def lines(directory, name):
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("rate", "expected"), [(0.0, "hard"), (0.25, "hard"), (0.26, "medium"), (0.74, "medium"), (0.75, "easy")]
)
def test_the_bounds_of_the_bands(rate, expected):
    assert grade.band(rate, GradeSection()) == expected


def test_every_prompt_is_graded_and_each_band_is_data_for_another_run(tmp_path, graded):
    assert graded().calls == [4, 4, 2]
    run_dir = tmp_path / "run"
    records = Workspace(tiny_config(tmp_path, *SETTINGS)).records("train")
    rates = {r.prompt: min(int(r.answer) % 5, SAMPLES) / SAMPLES for r in records}
    rows = lines(run_dir / "grade", "grades")
    assert [row["prompt"] for row in rows] == [r.prompt for r in records]
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 2
    assert {row["prompt"]: row["pass_rate"] for row in rows} == rates
    summary = json.loads((run_dir / "grade" / "summary.json").read_text())
    assert summary["pass_rate/mean"] == pytest.approx(np.mean(list(rates.values())))
    assert summary["policy"] == "builtin:tiny"
    for band in grade.BANDS:
        in_band = [row for row in rows if row["band"] == band]
        assert in_band == lines(run_dir / "grade", band)
        assert summary[f"prompts/{band}"] == len(in_band) > 0
        words = (f"data.train={run_dir / 'grade' / f'{band}.jsonl'}", "data.validation=task:running_sum")
        loaded = Workspace(tiny_config(tmp_path, *SETTINGS, *words)).records("train")
        of_band = [r for r in records if grade.band(rates[r.prompt], GradeSection()) == band]
        assert [(r.prompt_ids, r.answer) for r in loaded] == [(r.prompt_ids, r.answer) for r in of_band]
        assert {r.source for r in loaded} == {"running_sum"}


def test_an_interrupted_grading_goes_on_and_another_policy_starts_anew(tmp_path, graded):
    directory = tmp_path / "run" / "grade"
    assert graded(stop_at=2).calls == [4, 4]
    assert not (directory / "summary.json").exists()
    begun = (directory / "grades.jsonl").read_text()
    assert len(begun.splitlines()) == 8
    # As after a kill within the second step: it is done again, for nothing says that it is whole.
    (directory / "grades.jsonl").write_text("\n".join(begun.splitlines()[:6]) + "\n")
    assert graded().calls == [4, 2]
    assert (directory / "grades.jsonl").read_text().startswith(begun)
    resumed = {name: (directory / f"{name}.jsonl").read_text() for name in GRADED}
    assert graded().calls == [4, 4, 2]  # a finished one starts anew, and comes to the same
    assert {name: (directory / f"{name}.jsonl").read_text() for name in GRADED} == resumed

    assert graded(stop_at=2).calls == [4, 4]
    policy = directory / "policy.json"
    assert json.loads(policy.read_text()) == {"policy": "builtin:tiny", "step": None}
    policy.write_text('{"policy": "rl", "step": 3}')
    assert graded().calls == [4, 4, 2]
    assert json.loads(policy.read_text()) == {"policy": "builtin:tiny", "step": None}
    assert lines(directory, "grades")[-1]["step"] == 3
