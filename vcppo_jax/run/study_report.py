"""The page of a study: `study.html` (self-contained), `study.md` with `figures/*.svg`, and `results.json`.

All are written from what lies in the runs' directories, so a study that is under way has a page too.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from vcppo_jax.run.files import writing
from vcppo_jax.run.report import write_page
from vcppo_jax.run.study_charts import DrawnFigure, StudyFigure, draw_figure
from vcppo_jax.run.study_results import FOOTNOTE, QUANTITIES, Group, Quantity, Statistic, statistic


@dataclass(frozen=True)
class StudyTable:
    """A table that is asked for."""

    title: str
    claim: str
    arms: tuple[Group, ...]


@dataclass(frozen=True)
class Cell:
    """A number over seeds as text; `seeds` is "" where all seeds agree or there is one."""

    text: str
    seeds: str


@dataclass(frozen=True)
class Shown:
    """A table or figure as it stands on the page."""

    title: str
    claim: str
    notes: list[str]
    rows: list[tuple[str, str, list[Cell]]]
    """Of a table: label, seeds, cells."""
    svg: Markup
    """Of a figure; empty where there is nothing to draw yet."""
    file: str
    """Of a figure: its file, relative to the page."""


def write_study(
    out_dir: str | os.PathLike[str],
    *,
    title: str,
    arms: Sequence[Group],
    stages: Sequence[Group],
    tables: Sequence[StudyTable],
    figures: Sequence[StudyFigure],
) -> Path:
    """Write the page and its companions into `out_dir`, and return the path of `study.html`.

    Raises WriteError.
    """
    out_dir = Path(out_dir)
    with writing(out_dir / "figures"):
        (out_dir / "figures").mkdir(parents=True, exist_ok=True)
    drawn = [draw_figure(figure, f"figure-{number}") for number, figure in enumerate(figures, start=1)]
    files = [f"figures/{number}-{figure.kind}.svg" for number, figure in enumerate(figures, start=1)]
    for file, picture in zip(files, drawn, strict=True):
        if picture.in_file:
            with writing(out_dir / file):
                (out_dir / file).write_text(picture.in_file, encoding="utf-8")
    shown_tables = [_shown_table(table) for table in tables]
    shown_figures = [
        Shown(figure.title, figure.claim, list(picture.notes), [], Markup(picture.in_page), file)
        for figure, picture, file in zip(figures, drawn, files, strict=True)
    ]
    page = {
        "title": title,
        "progress": _progress(arms, stages),
        "troubles": _troubles([*stages, *arms]),
        "columns": [quantity.label for quantity in QUANTITIES.values()],
        "tables": shown_tables,
        "figures": shown_figures,
        "footnote": FOOTNOTE,
    }
    write_page(out_dir / "study.md", "study.md.j2", **page)
    _write_results(out_dir / "results.json", title, arms, stages, figures, files, drawn)
    written = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return write_page(out_dir / "study.html", "study.html.j2", written=written, **page)


def _progress(arms: Sequence[Group], stages: Sequence[Group]) -> str:
    """How many runs are finished."""
    parts = []
    for name, groups in (("arm", arms), ("stage", stages)):
        runs = sum(len(group.runs) for group in groups)
        finished = sum(len(group.finished) for group in groups)
        if runs:
            seeds = len(groups[0].runs)
            parts.append(
                f"{finished} of {runs} {name} runs finished ({len(groups)} {name}{'s' * (len(groups) != 1)}, "
                f"{seeds} seed{'s' * (seeds != 1)})"
            )
    return "; ".join(parts)


def _troubles(groups: Sequence[Group]) -> list[str]:
    """One line per run that failed or was refused."""
    return [
        f"{group.label}, seed {run.seed}: {run.note}"
        for group in groups
        for run in group.runs
        if run.recorded
    ]


def _shown_table(table: StudyTable) -> Shown:
    rows = []
    for arm in table.arms:
        cells = [cell(statistic(arm, quantity), quantity) for quantity in QUANTITIES.values()]
        rows.append((arm.label, f"{len(arm.finished)} of {len(arm.runs)}", cells))
    notes = [note for arm in table.arms for note in arm.notes]
    return Shown(table.title, table.claim, notes, rows, Markup(""), "")


def cell(found: Statistic, quantity: Quantity) -> Cell:
    """`mean ± std` and the seeds' values, as text; "–" where no seed has the number."""
    if found.mean is None:
        return Cell("–", "")
    text, values = format(found.mean, quantity.form), list(found.by_seed.values())
    if found.std is None or len(set(values)) == 1:
        return Cell(text, "")
    spread = format(found.std, quantity.form.lstrip("+"))
    return Cell(f"{text} ± {spread}", ", ".join(format(value, quantity.form) for value in values))


# Every number, for machines.


def _write_results(
    path: Path,
    title: str,
    arms: Sequence[Group],
    stages: Sequence[Group],
    figures: Sequence[StudyFigure],
    files: Sequence[str],
    drawn: Sequence[DrawnFigure],
) -> None:
    results = {
        "title": title,
        "arms": {arm.name: _group_json(arm) | {"numbers": _numbers(arm)} for arm in arms},
        "stages": {stage.name: _group_json(stage) for stage in stages},
        "figures": [
            {"title": figure.title, "kind": figure.kind, "file": file, "panels": _panels(picture)}
            for figure, file, picture in zip(figures, files, drawn, strict=True)
        ],
    }
    text = json.dumps(results, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        partial.write_text(text, "utf-8")
        os.replace(partial, path)


def _group_json(group: Group) -> dict[str, Any]:
    seeds = {run.seed: {"status": run.status, "note": run.note} for run in group.runs}
    return {"label": group.label, "seeds": seeds}


def _numbers(arm: Group) -> dict[str, Any]:
    numbers = {}
    for name, quantity in QUANTITIES.items():
        found = statistic(arm, quantity)
        numbers[name] = {"mean": found.mean, "std": found.std, "by_seed": dict(found.by_seed)}
    return numbers


def _panels(picture: DrawnFigure) -> list[dict[str, Any]]:
    return [
        {
            "x": panel.xlabel,
            "y": panel.axis.label,
            "lines": [
                {
                    "label": line.label,
                    "x": line.curve.x,
                    "mean": line.curve.over_seeds(fmean),
                    "min": line.curve.over_seeds(min),
                    "max": line.curve.over_seeds(max),
                    "by_seed": {
                        seed: [values.get(x) for x in line.curve.x]
                        for seed, values in line.curve.by_seed.items()
                    },
                }
                for line in panel.lines
                if not line.formula
            ],
        }
        for panel in picture.panels
    ]
