from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from vcppo_jax.run.metrics import MetricsError, MetricsWriter, StepLog, WandbSettings, read_metrics


def open_writer(directory, resume_step=None, **kwargs):
    return MetricsWriter(
        directory, resume_step=resume_step, **{"tensorboard": False, "wandb": None, **kwargs}
    )


def test_floats_are_written_with_every_digit(tmp_path):
    values = {
        "third": 1 / 3,
        "float32": np.float32(0.1),
        "zero_dim": np.array(2.5, np.float32),
        "one_element": np.array([7], np.int32),
        "flag": True,
    }
    with open_writer(tmp_path) as writer:
        writer.write(0, values)
    (line,) = read_metrics(tmp_path)
    assert line == {
        "step": 0,
        "third": 1 / 3,
        "float32": float(np.float32(0.1)),
        "zero_dim": 2.5,
        "one_element": 7,
        "flag": 1,
    }


def test_jax_scalars_are_numbers(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    with open_writer(tmp_path) as writer:
        writer.write(1, {"loss": jnp.float32(0.1), "half": jnp.bfloat16(0.5)})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": float(np.float32(0.1)), "half": 0.5}]


def test_non_finite_numbers_stay_valid_json_and_read_back(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant):
        raise AssertionError(f"not JSON: {constant}")

    raw = json.loads(writer.path.read_text(), parse_constant=refuse)
    assert raw == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (line,) = read_metrics(writer.path)
    assert math.isnan(line["a"])
    assert (line["b"], line["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("value", ["high", None, [1.0], np.ones(2)])
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    with open_writer(tmp_path) as writer, pytest.raises(TypeError, match="'actor/lr'"):
        writer.write(1, {"actor/lr": value})
    assert read_metrics(tmp_path) == []


def test_steps_must_increase(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.write(2, {"a": 1.0})
        with pytest.raises(ValueError, match="step 2 comes after step 2"):
            writer.write(2, {"b": 1.0})


@pytest.mark.parametrize("tail", [b"", b'{"step": 7, "a": 0.3', b'{"step": 7'])
def test_resumed_file_equals_an_uninterrupted_one(tmp_path, tail):
    def steps(writer, first, last):
        for step in range(first, last + 1):
            writer.write(step, {"a": math.sin(step), "b": math.nan if step == 2 else step})

    with open_writer(tmp_path / "whole") as writer:
        steps(writer, 1, 9)
    with open_writer(tmp_path / "cut") as writer:
        steps(writer, 1, 6)
    with writer.path.open("ab") as file:
        file.write(tail)
    with open_writer(tmp_path / "cut", resume_step=4) as writer:
        assert writer.last_step == 4
        steps(writer, 5, 9)
    assert writer.path.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["metrics.jsonl"]


def test_start_from_nothing_drops_what_was_there(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.write(0, {"a": 1.0})
    with open_writer(tmp_path, resume_step=0) as writer:
        assert writer.last_step == 0
    with open_writer(tmp_path) as writer:
        assert writer.last_step is None
    assert read_metrics(tmp_path) == []


def test_every_line_survives_sigkill(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from vcppo_jax.run.metrics import MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1], resume_step=None, tensorboard=False, wandb=None)\n"
        "writer.write(1, {'a': 0.1})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, cwd=os.getcwd())
    assert result.returncode == -signal.SIGKILL
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.1}]


def test_damage_inside_the_file_is_named_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a"\n{"step": 3}\n')
    with pytest.raises(MetricsError, match=r"metrics\.jsonl:2: expected a JSON object"):
        read_metrics(path)
    with pytest.raises(MetricsError, match=r"metrics\.jsonl:2"):
        open_writer(tmp_path, resume_step=3)
    assert path.read_text().startswith('{"step": 1}\n')
    with pytest.raises(MetricsError, match="cannot read"):
        read_metrics(tmp_path / "absent.jsonl")


def test_step_log_keeps_several_lines_of_a_step_and_any_text(tmp_path):
    log = StepLog(tmp_path / "samples.jsonl", resume_step=None)
    for step in (1, 1, 2, 3):
        log.append({"step": step, "response": "déjà\n\u2028 🙂", "score": math.nan})
    log.append({"step": 3, "response": "cut \ud83d"})
    with pytest.raises(ValueError, match="step 2 comes after step 3"):
        log.append({"step": 2})
    log.close()
    log = StepLog(tmp_path / "samples.jsonl", resume_step=1)
    log.close()
    lines = [json.loads(line) for line in log.path.read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1, 1]
    assert lines[0]["response"] == "déjà\n\u2028 🙂"


def test_tensorboard_hides_steps_that_are_run_again(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with open_writer(tmp_path, tensorboard=True) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"critic/score/mean": float(step)})
    with open_writer(tmp_path, resume_step=1, tensorboard=True) as writer:
        writer.write(2, {"critic/score/mean": 20.0})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 1.0), (2, 20.0)]


def test_tensorboard_files(tmp_path):
    for resume_step in (None, 1):
        with open_writer(tmp_path, resume_step=resume_step, tensorboard=True) as writer:
            writer.write(1 if resume_step is None else 2, {"a": 0.5})
    files = list((tmp_path / "tensorboard").iterdir())
    assert len(files) == 2
    assert all(b"brain.Event:2" in file.read_bytes() for file in files)


class FakeRun:
    def __init__(self, settings):
        self.settings, self.lines, self.exit_code = settings, [], None

    def log(self, metrics, step):
        self.lines.append((step, metrics))

    def finish(self, exit_code):
        self.exit_code = exit_code


def test_wandb_goes_on_in_the_same_run_after_a_resume(tmp_path, monkeypatch):
    runs = []

    def init(**settings):
        runs.append(FakeRun(settings))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    settings = WandbSettings(project="p", name="quick/rl", config={"seed": 1})
    with open_writer(tmp_path, wandb=settings) as writer:
        writer.write(1, {"a": np.float32(0.5)})
    with pytest.raises(KeyError), open_writer(tmp_path, resume_step=1, wandb=settings) as writer:
        raise KeyError("a phase that fails")
    with open_writer(tmp_path, wandb=settings):
        pass
    first, second, third = runs
    assert first.lines == [(1, {"a": 0.5})]
    assert (first.settings["project"], first.settings["name"]) == ("p", "quick/rl")
    assert first.settings["config"] == {"seed": 1}
    assert first.settings["id"] == second.settings["id"] != third.settings["id"]
    assert (first.exit_code, second.exit_code) == (0, 1)


def test_wandb_missing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MetricsError, match=r"vcppo_jax\[wandb\]"):
        open_writer(tmp_path, wandb=WandbSettings(project="p", name="n"))


def test_import_is_light():
    program = (
        "import sys, vcppo_jax.run.metrics\n"
        "heavy = {'jax', 'torch', 'tensorboardX', 'wandb', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
