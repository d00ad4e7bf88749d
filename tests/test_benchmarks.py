"""The scripts in benchmarks/ start, and the quick ones run to the end at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = ("gae", "generate", "update", "first_update", "iteration", "stages")


@pytest.fixture
def beside(monkeypatch):
    """What a script in benchmarks/ can import."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in (*SCRIPTS, "common", "shapes", "ours", "peer_torch"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("script", ["generate", "update", "first_update", "iteration"])
def test_help(script):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout


def test_gae_runs_and_all_agree(beside, capsys):
    import gae

    assert gae.main(["--batch", "2", "--length", "40", "--repeats", "1"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    errors = [row[3].strip() for row in rows[2:]]
    assert len(errors) == 12
    assert all(float(error) < 1e-5 for error in errors if error != "other mask")
    assert errors.count("other mask") == 1


def test_lognormal_lengths_have_their_median_and_percentile(beside):
    import generate

    lengths = generate.lognormal_lengths(200_000, 10**6)
    assert abs(np.median(lengths) / 200 - 1) < 0.02
    assert abs(np.percentile(lengths, 99) / 2000 - 1) < 0.04
    assert generate.lognormal_lengths(1000, 512).max() == 512
    assert generate.static_row_steps(np.array([1, 3, 2, 2, 5]), 2) == 2 * 3 + 2 * 2 + 5


def test_an_iteration_learns_the_same_as_the_plain_torch_one(beside, tmp_path):
    pytest.importorskip("torch")
    import common
    import iteration
    import shapes

    small = shapes.TINY | {"num_hidden_layers": 1, "vocab_size": 128}
    model = shapes.write_model(tmp_path / "counting", small, counting=True)
    lengths = [1, 5, 8, 2]
    prompts = [[7, 3, 127 - length] for length in lengths]
    work = {"samples": 4, "batch": 2, "cap": 8, "mini_batch": 2, "micro_batch": 1, "remat": "none"}
    work |= {"prompt_tokens": 3, "eos": 127}
    answers = []
    for make in (iteration.ours, iteration.plain_torch):
        stages = common.Stages()
        answers.append(make(str(model), work)(prompts, 0, stages))
        assert tuple(stages.seconds) == iteration.STAGES
    ours, torch = answers
    assert ours["lengths"] == torch["lengths"] == lengths
    assert len(ours["losses"]["actor"]) == 2
    for name, losses in ours["losses"].items():
        assert min(map(abs, losses)) > 1e-3
        np.testing.assert_allclose(losses, torch["losses"][name], rtol=1e-4, err_msg=name)


def test_the_stages_of_a_run_sum_to_its_steps(beside, tmp_path, capsys):
    import stages

    (tmp_path / "rl").mkdir()
    rows = [
        {"step": 0, "val-core/x/acc/mean@1": 0.5},
        {"step": 1, "timing_s/generate": 8.0, "timing_s/step": 20.0},
        {"step": 2, "timing_s/generate": 1.0, "timing_s/adv": 0.5, "timing_s/step": 2.0},
        {"step": 3, "timing_s/generate": 2.0, "timing_s/step": 2.0},
    ]
    (tmp_path / "rl" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert stages.main([str(tmp_path)]) == 0
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:]] for row in table[2:]}
    assert cells == {
        "generate": ["8.00", "3.00", "75.0%", "1500.0 (1000.0-2000.0)"],
        "adv": ["0.00", "0.50", "12.5%", "250.0 (0.0-500.0)"],
        "other": ["12.00", "0.50", "12.5%", "250.0 (0.0-500.0)"],
        "step": ["20.00", "4.00", "100.0%", "2000.0 (2000.0-2000.0)"],
    }
    assert stages.main([str(tmp_path / "rl")]) == 1
    assert "expected a run's directory" in capsys.readouterr().err
