"""Figures of a study: panels of lines, each the mean over seeds in a band from the least to the greatest."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from vcppo_jax.run.figures import GRID, INK, Series, describe_lines, inline_svg, style_axes
from vcppo_jax.run.study_results import Curve, Group, metric_curve, position_curve, read_positions


@dataclass(frozen=True)
class MetricAxis:
    """How a metric is drawn."""

    label: str
    """With its unit."""
    percent: bool = False
    from_zero: bool = False


METRICS: dict[str, MetricAxis] = {
    "held_out/accuracy": MetricAxis("accuracy (held-out problems)", percent=True, from_zero=True),
    "held_out/response_length": MetricAxis("response length (tokens, held-out problems)", from_zero=True),
    "critic/acc/mean": MetricAxis("accuracy (samples in training)", percent=True, from_zero=True),
    "response_length/mean": MetricAxis("response length (tokens)", from_zero=True),
    "response_length/clip_ratio": MetricAxis("responses cut by the limit", percent=True),
    "critic/score/mean": MetricAxis("score"),
    "critic/rewards/mean": MetricAxis("reward"),
    "critic/vf_loss": MetricAxis("value loss, ½(V − R)²", from_zero=True),
    "critic/vf_explained_var": MetricAxis("explained variance of the values"),
    "critic/values/mean": MetricAxis("mean value"),
    "critic/advantage_position_corr": MetricAxis("correlation of advantage and position"),
    "critic/grad_norm": MetricAxis("gradient norm of the value model"),
    "critic/kl": MetricAxis("KL to the reference (nats per token)"),
    "actor/entropy": MetricAxis("entropy (nats per token)", from_zero=True),
    "actor/ppo_kl": MetricAxis("KL to the sampling policy (nats per token)"),
    "actor/pg_clipfrac": MetricAxis("clipped tokens", percent=True),
    "actor/grad_norm": MetricAxis("gradient norm of the policy"),
    "held_out/vf_loss": MetricAxis("value loss, ½(V − R)² (held-out rollouts)"),
    "held_out/vf_explained_var": MetricAxis("explained variance (held-out rollouts)"),
}
"""What figures can show: metrics of the phases, and the two that `study_results.metric` derives."""

_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b0508c", "#a67600", "#2f9fd8", "#4d4d4d")
"""Okabe and Ito's colours, which colour-blind readers tell apart, darkened where they are faint on white."""
_SERIES = tuple(f"#0a0b3{index}" for index in range(len(_LIGHT)))
_PAPER = "#0a0b40"
_IN_PAGE = {
    _PAPER: "none",
    INK: "var(--ink)",
    GRID: "var(--grid)",
    **{colour: f"var(--s{index})" for index, colour in enumerate(_SERIES)},
}
_IN_FILE = {_PAPER: "#ffffff", INK: "#1c1f24", GRID: "#dfe1e5", **dict(zip(_SERIES, _LIGHT, strict=True))}
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_PANEL_INCHES = (4.7, 2.6)
_PANELS_PER_ROW = 2
_MARKERS_UP_TO = 12
_LEAST_WEIGHT = 1e-6
"""Bottom of the logarithmic axis."""


@dataclass(frozen=True)
class Line:
    """A curve over seeds; `style` numbers the arm or stage in the whole study, so that its look is one."""

    label: str
    style: int
    curve: Curve
    formula: bool = False
    """Drawn thin and dotted over the measured line."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    xlabel: str
    axis: MetricAxis
    lines: tuple[Line, ...]
    zero_line: bool = False
    logarithmic: bool = False


@dataclass(frozen=True)
class StudyFigure:
    """A figure that is asked for: `groups` are pairs of an arm or stage and its number in the study."""

    kind: str
    title: str
    claim: str
    groups: tuple[tuple[Group, int], ...]
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class DrawnFigure:
    """A figure as element of the page and as a file, the panels it was drawn from, and what it lacks."""

    in_page: str
    in_file: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...]


def unknown_metric(name: str) -> str | None:
    """What is wrong with the name of a metric; None if it can be drawn."""
    if name in METRICS:
        return None
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(METRICS)}"
    return f"unknown metric {name!r}{hint}"


# What each kind of figure shows.


def _metric_panels(figure: StudyFigure) -> tuple[list[Panel], list[str]]:
    phase = "rl" if figure.kind == "curves" else None
    xlabel = "RL step" if phase == "rl" else "step"
    panels = []
    for name in figure.metrics:
        lines = [Line(group.label, style, metric_curve(group, name, phase)) for group, style in figure.groups]
        panels.append(Panel(xlabel, METRICS[name], tuple(lines)))
    return panels, []


def _position_panels(figure: StudyFigure) -> tuple[list[Panel], list[str]]:
    positions, notes = _positions(figure)
    panels = []
    for name in ("values", "advantages"):
        lines = [
            Line(group.label, style, position_curve(found, "by_position", name))
            for group, style, found in positions
        ]
        axis = MetricAxis(f"mean {name.removesuffix('s')}")
        panels.append(Panel("token position", axis, tuple(lines), zero_line=True))
    return panels, notes


def _decay_panels(figure: StudyFigure) -> tuple[list[Panel], list[str]]:
    """The measured weight of the last reward d tokens before it, and (gamma lambda_actor)^d beside it."""
    positions, notes = _positions(figure)
    lines: list[Line] = []
    for group, style, found in positions:
        measured = position_curve(found, "by_distance_to_end", "reward_weight")
        lines.append(Line(group.label, style, measured))
        content = next(iter(found.values()), {})
        if measured.x and content.get("length_adaptive_alpha") is None:
            base = content.get("gamma", 1.0) * content["lambda_actor"]
            curve = Curve({0: {x: base**x for x in range(measured.x[-1] + 1)}})
            lines.append(Line("(γ λ_actor)^d", style, curve, formula=True))
    axis = MetricAxis("weight of the last reward", from_zero=True)
    xlabel = "tokens before the last one, d"
    above = tuple(
        Line(
            line.label,
            line.style,
            Curve(
                {
                    seed: {x: y for x, y in values.items() if y >= _LEAST_WEIGHT}
                    for seed, values in line.curve.by_seed.items()
                }
            ),
            line.formula,
        )
        for line in lines
    )
    logarithmic = MetricAxis("weight (logarithmic)")
    return [
        Panel(xlabel, axis, tuple(lines)),
        Panel(xlabel, logarithmic, above, logarithmic=True),
    ], notes


def _positions(figure: StudyFigure) -> tuple[list[tuple[Group, int, dict[int, dict[str, Any]]]], list[str]]:
    found, notes = [], []
    for group, style in figure.groups:
        positions, missing = read_positions(group)
        found.append((group, style, positions))
        notes += missing
    return found, notes


KINDS = {
    "curves": _metric_panels,
    "value_loss": _metric_panels,
    "positions": _position_panels,
    "reward_decay": _decay_panels,
}


def draw_figure(figure: StudyFigure, identity: str) -> DrawnFigure:
    """A figure of the study; with nothing to draw yet, `in_page` and `in_file` are empty."""
    panels, notes = KINDS[figure.kind](figure)
    notes = [note for group, _ in figure.groups for note in group.notes] + notes
    shown = []
    for panel in panels:
        lines = tuple(line for line in panel.lines if line.curve.x)
        if lines:
            shown.append(Panel(panel.xlabel, panel.axis, lines, panel.zero_line, panel.logarithmic))
        missing = [line.label for line in panel.lines if not line.curve.x and not line.formula]
        if missing:
            notes.append(f"{panel.axis.label}: nothing of {', '.join(missing)}")
    if not shown:
        return DrawnFigure("", "", (), tuple(notes))
    in_page, in_file = _draw(shown, identity)
    return DrawnFigure(in_page, in_file, tuple(shown), tuple(notes))


# Drawing.


def _draw(panels: Sequence[Panel], identity: str) -> tuple[str, str]:
    """(SVG element for the page, SVG file)."""
    columns = min(len(panels), _PANELS_PER_ROW)
    rows = -(-len(panels) // columns)
    legend: dict[str, Any] = {}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": identity, "font.size": 8.5}):
        width, height = _PANEL_INCHES
        size = (width * columns, height * rows + 0.35)
        figure = Figure(figsize=size, facecolor=_PAPER, layout="constrained")
        FigureCanvasSVG(figure)
        for number, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, columns, number, facecolor="none")
            for line in panel.lines:
                legend.setdefault(line.label, _plot(axes, line))
            _finish(axes, panel)
        _add_legend(figure, legend, columns=min(len(legend), 2 * columns))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    description = " ".join(
        describe_lines(
            [Series(line.label, line.curve.x, line.curve.over_seeds(fmean)) for line in panel.lines],
            panel.xlabel,
            panel.axis.label,
            panel.axis.percent,
        )
        for panel in panels
    )
    svg = buffer.getvalue()
    return inline_svg(svg, identity, description, _IN_PAGE), _coloured(svg, _IN_FILE)


def _plot(axes: Axes, line: Line) -> Any:
    """Draw a line with its band; the handle for the legend."""
    colour, dashes = _SERIES[line.style % len(_SERIES)], _DASHES[line.style % len(_DASHES)]
    x, mean = line.curve.x, line.curve.over_seeds(fmean)
    if line.formula:
        return axes.plot(x, mean, color=INK, linestyle=":", linewidth=1.0, zorder=3)[0]
    if len(line.curve.by_seed) > 1:
        low, high = line.curve.over_seeds(min), line.curve.over_seeds(max)
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    marker = "o" if len(x) <= _MARKERS_UP_TO else None
    return axes.plot(x, mean, color=colour, linestyle=dashes, linewidth=1.6, marker=marker, markersize=3)[0]


def _finish(axes: Axes, panel: Panel) -> None:
    style_axes(axes, panel.xlabel, panel.axis.label, percent=panel.axis.percent)
    if panel.zero_line:
        axes.axhline(0.0, color=INK, linewidth=0.7, alpha=0.5, zorder=1)
    if panel.axis.from_zero:
        axes.set_ylim(bottom=0.0)
    if panel.logarithmic:
        axes.set_yscale("log")
        # At least a decade: a weight that stays at 1 is a flat line, not a picture of its rounding.
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, high / 20), high * 1.5)


def _add_legend(figure: Figure, lines: Mapping[str, Any], *, columns: int) -> None:
    """The labels above the panels, in at most `columns`, and in as few as their width asks for."""
    for count in range(columns, 0, -1):
        legend = figure.legend(
            lines.values(),
            lines.keys(),
            loc="outside upper left",
            ncols=count,
            frameon=False,
            labelcolor=INK,
            handlelength=2.6,
        )
        if count == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _coloured(svg: str, colours: Mapping[str, str]) -> str:
    return re.sub(r"#0a0b[0-9a-f]{2}", lambda match: colours[match[0]], svg)
