"""The `vcppo` command: help, exit status, one line per error, nothing heavy before it is needed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_model import TINY_DIR
from tiny_networks import random_params

from vcppo_jax import cli
from vcppo_jax.config_load import iterate_keys

MINIMAL = "run_dir: {run_dir}\nmodel: {{path: 'builtin:tiny'}}\ndata: {{train: 'task:running_sum'}}\n"


@pytest.fixture(autouse=True)
def _own_jax_settings(monkeypatch):
    """Inside the test process, jax keeps the settings that the other tests run with."""
    monkeypatch.setattr(cli, "_configure_jax", lambda: None)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL.format(run_dir=tmp_path / "run"))
    return path


def help_of(capsys, *words) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def error_of(capsys, *words) -> str:
    """The one line that a user's error leaves on stderr; the status is 1."""
    assert cli.main([str(word) for word in words]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("vcppo: ")
    return lines[0]


def test_help_lists_the_commands(capsys):
    text = help_of(capsys)
    for command, explanation in cli.COMMANDS.items():
        assert command in text
        assert explanation.split(";")[0][:40] in " ".join(text.split())


@pytest.mark.parametrize("command", ["run", *cli.SECTIONS])
def test_help_of_a_phase_explains_every_key_of_its_sections(capsys, command):
    text = help_of(capsys, command)
    flat = " ".join(text.split())
    named = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and "  (" in line]
    sections = cli.SECTIONS.get(command)
    for key, field in iterate_keys():
        section = key.partition(".")[0]
        if "." not in key or sections is None or section in sections:
            assert key in named
            assert " ".join(field.description.split()) in flat, key
        else:
            assert key not in named


def test_sections_exist():
    sections = {key.partition(".")[0] for key, _ in iterate_keys() if "." in key}
    assert {name for names in cli.SECTIONS.values() for name in names} <= sections


def test_help_shows_defaults_as_they_are_written(capsys):
    text = help_of(capsys, "rl")
    for shown in (
        "run_dir  (required)",
        "algorithm.lambda_actor  (default 0.95)",
        "algorithm.dual_clip  (default null)",
        "algorithm.whiten_advantages  (default null)",
        "phases  (default [sft, value, rl, evaluate])",
    ):
        assert shown in text


@pytest.mark.parametrize("command", ["export", "report"])
def test_help_of_the_other_commands(capsys, command):
    text = help_of(capsys, command)
    assert "RUN" in text
    assert "keys of the configuration" not in text


def test_nothing_heavy_is_imported_before_the_command_is_understood(tmp_path):
    """The package, every help and a configuration's error must not wait for jax."""
    source = f"""
import contextlib, io, sys
import vcppo_jax
from vcppo_jax.cli import main
for words in (["--help"], ["rl", "--help"], ["run", "--help"], ["export", "--help"], ["nonsense"]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words)
        except SystemExit:
            pass
with contextlib.redirect_stderr(io.StringIO()):
    assert main(["rl", {str(tmp_path / "none.yaml")!r}]) == 1
heavy = {{"jax", "flax", "optax", "orbax", "transformers", "torch", "matplotlib"}} & set(sys.modules)
print("heavy:", sorted(heavy))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "heavy: []\n"


def test_help_takes_less_than_half_a_second():
    """Of the processor: a machine may be busy."""

    def seconds():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = seconds()
    subprocess.run([sys.executable, "-m", "vcppo_jax.cli", "--help"], capture_output=True, check=True)
    assert seconds() - before < 0.5


@pytest.mark.parametrize("chosen", [None, "elsewhere"])
def test_compiled_programs_are_kept_between_runs(tmp_path, chosen):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    if chosen is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = chosen
    source = (
        "from vcppo_jax import cli; cli._configure_jax(); "
        "import jax; print(jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["True", chosen or str(tmp_path / "vcppo_jax" / "xla")]


def test_a_command_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["trian", "x.yaml"])
    assert stop.value.code == 2
    assert "trian" in capsys.readouterr().err


def test_a_missing_file(capsys, tmp_path):
    path = tmp_path / "none.yaml"
    assert error_of(capsys, "run", path).startswith(f"vcppo: {path}: cannot read the configuration: No such")


def test_bad_yaml(capsys, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("run_dir: x\nrl: [1\n")
    assert f"{path}:3: not valid YAML" in error_of(capsys, "value", path)


def test_an_unknown_key(capsys, config):
    line = error_of(capsys, "rl", config, "rl.stepz=3")
    assert line == f"vcppo: {config}: unknown key 'rl.stepz'; did you mean 'rl.steps'?"


def test_a_mesh_that_does_not_fit_starts_nothing(capsys, config, tmp_path):
    line = error_of(capsys, "rl", config, "mesh.fsdp=3")
    assert "mesh: data 1 x fsdp 3 x sequence 1 x tensor 1 = 3, but there are 8 devices" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("below", "problem"), [("", "there is a file of that name"), ("/run", "Not a directory")]
)
def test_a_run_dir_that_is_a_file(capsys, config, tmp_path, below, problem):
    (tmp_path / "afile").touch()
    line = error_of(capsys, "evaluate", config, f"run_dir={tmp_path}/afile{below}", "mesh.fsdp=8")
    assert line == (
        f"vcppo: run_dir={tmp_path}/afile{below}: expected a directory that is there or can be made, but "
        f"{problem}; choose another run_dir"
    )


def test_an_error_of_two_files_names_both():
    error = OSError(28, "No space left on device", "from.json", None, "to.json")
    assert cli._message(error) == "from.json -> to.json: No space left on device"


def evaluate_until(signum, workspace):
    """An evaluation that a signal ends between two chunks of sampling."""
    workspace.progress.start("evaluate", 1)
    workspace.signals._receive(signum, None)
    workspace.signals.check()


def train_until(signum, workspace):
    """A phase whose loop a signal ends after its first step."""
    from vcppo_jax.phases.loop import StepResult

    def step_function(step, state, meta):
        workspace.signals._receive(signum, None)
        return StepResult(state, meta, {"a": 1.0})

    state = {"a": np.zeros(2, np.float32)}
    workspace.loop("sft", 2).run(lambda: state, state, step_function)


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (evaluate_until, "evaluate: {signal}: interrupted; the same command goes on"),
        (train_until, "sft: {signal}: step 1 is saved in {run}/sft; the same command goes on"),
    ],
)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_phase_says_so_once(capsys, config, tmp_path, monkeypatch, phase, said, signum):
    monkeypatch.setattr("vcppo_jax.phases.pipeline.PHASES", {"rl": lambda w: phase(signum, w)})
    assert cli.main(["rl", str(config), "mesh.fsdp=8", "logging.tensorboard=false"]) == 128 + signum
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [line for line in captured.out.splitlines() if "goes on" in line]
    assert lines == [said.format(signal=signum.name, run=tmp_path / "run")]


def test_a_study_that_is_interrupted_between_runs_says_so(capsys, monkeypatch):
    from vcppo_jax.phases.loop import Interrupted

    def run_study(plan):
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr("vcppo_jax.phases.study.read_study", lambda file: None)
    monkeypatch.setattr("vcppo_jax.phases.study.run_study", run_study)
    assert cli.main(["study", "study.yaml"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "vcppo: SIGTERM: interrupted; the same command goes on\n"


def test_a_report_of_nothing(capsys, tmp_path):
    assert str(tmp_path / "none") in error_of(capsys, "report", tmp_path / "none")


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    from vcppo_jax.models.config import model_config
    from vcppo_jax.models.hf import export_policy
    from vcppo_jax.models.networks import Policy

    config = model_config(TINY_DIR, compute_dtype="float32", remat="none")
    out = tmp_path_factory.mktemp("hf") / "model"
    return export_policy(Policy(random_params(config), config), out, source_dir=TINY_DIR)


def test_export_writes_a_new_directory(capsys, hf_dir, tmp_path):
    assert cli.main(["export", str(hf_dir), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"exported: {tmp_path / 'out'}\n"
    assert (tmp_path / "out" / "config.json").is_file()


def test_export_to_a_directory_in_use_is_refused(capsys, hf_dir, tmp_path):
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    line = error_of(capsys, "export", hf_dir, tmp_path)
    assert str(tmp_path) in line
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("size", [20_000, 8_000])
def test_export_to_a_full_disk(capsys, hf_dir, tmp_path, size):
    """The weights, or before them the tokenizer, exceed what a file may hold."""
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        line = error_of(capsys, "export", hf_dir, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line == (
        f"vcppo: {out}: cannot be written: File too large; make room, or choose a place that can be written"
    )
    assert list(tmp_path.iterdir()) == []


def test_export_of_nothing(capsys, tmp_path):
    line = error_of(capsys, "export", tmp_path / "none", tmp_path / "out")
    assert f"{tmp_path / 'none'}: does not exist; expected a directory with a config.json" in line
    assert not (tmp_path / "out").exists()
