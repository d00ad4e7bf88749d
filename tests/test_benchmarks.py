"""The scripts in benchmarks/ start, and the quick ones run to the end at a tiny size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = ("gae", "generate", "update", "first_update")


@pytest.fixture
def beside(monkeypatch):
    """What a script in benchmarks/ can import."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in (*SCRIPTS, "common", "shapes"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("script", ["generate", "update", "first_update"])
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


def test_a_counting_model_ends_after_the_prescribed_tokens(beside, tmp_path):
    import generate
    import shapes

    model = shapes.write_model(tmp_path / "counting", shapes.TINY, counting=True)
    lengths = [1, 5, 8]
    prompts = [[7, 300, 511 - length] for length in lengths]
    found = generate.ours()(str(model), prompts, batch=2, new=8, eos=511, seed=0)
    assert found == lengths


def test_lognormal_lengths_have_their_median_and_percentile(beside):
    import generate

    lengths = generate.lognormal_lengths(200_000, 10**6)
    assert abs(np.median(lengths) / 200 - 1) < 0.02
    assert abs(np.percentile(lengths, 99) / 2000 - 1) < 0.04
    assert generate.lognormal_lengths(1000, 512).max() == 512
    assert generate.static_row_steps(np.array([1, 3, 2, 2, 5]), 2) == 2 * 3 + 2 * 2 + 5
