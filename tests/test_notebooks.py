"""The notebooks run from any working directory, draw their figures, and are committed without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HOW = "not installed: python3 -m pip install -e '.[notebooks]'"
nbformat = pytest.importorskip("nbformat", reason=f"nbformat is {HOW}")
preprocessors = pytest.importorskip("nbconvert.preprocessors", reason=f"nbconvert is {HOW}")
pytest.importorskip("ipykernel", reason=f"ipykernel is {HOW}")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
FIGURES = {"decoupled_gae": 4, "value_pretraining": 3}
CELL_SECONDS = 300
"""Longest time of one cell. Generous: the slowest trains a model, and other tests may share the cores."""


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_committed_clean(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert outputs(notebook) == []
    assert all(cell.get("execution_count") is None for cell in notebook.cells)


@pytest.mark.parametrize("name", FIGURES)
def test_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    # A reader has one CPU device, not the suite's eight virtual ones.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = read(name)
    run = preprocessors.ExecutePreprocessor(timeout=CELL_SECONDS, kernel_name="python3")
    run.preprocess(notebook, {"metadata": {"path": str(tmp_path)}})  # raises where a cell does
    found = outputs(notebook)
    assert not [output for output in found if output.output_type == "error"]
    figures = [output for output in found if "image/png" in output.get("data", {})]
    assert len(figures) == FIGURES[name]
    assert list(tmp_path.iterdir()) == []  # what it writes goes to a temporary directory
