"""Figures of the report as inline SVG, drawn with matplotlib's object interface (no pyplot).

Colours in the SVG are CSS variables of the page (`--ink`, `--grid`, `--c1`, ...), so a figure follows the
page into dark mode; its text is text, in the page's font.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

_VARIABLES = {
    "#0a0b01": "var(--ink)",
    "#0a0b02": "var(--grid)",
    "#0a0b11": "var(--c1)",
    "#0a0b12": "var(--c2)",
    "#0a0b13": "var(--c3)",
    "#0a0b14": "var(--c4)",
    "#0a0b21": "var(--early)",
    "#0a0b22": "var(--middle)",
    "#0a0b23": "var(--late)",
}
"""Colours that matplotlib draws with, and what stands in their place in the page."""
INK, GRID, *_COLOURS = _VARIABLES
CATEGORIES, SEQUENCE = tuple(_COLOURS[:4]), tuple(_COLOURS[4:])
_SIZE_INCHES = (4.7, 2.75)
_MARKERS_UP_TO = 12


@dataclass(frozen=True)
class Series:
    """One line of a chart; `y` may hold NaN, where the line has a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(
    series: Sequence[Series],
    *,
    identity: str,
    xlabel: str,
    ylabel: str,
    percent: bool = False,
    zero_line: bool = False,
    ordered: bool = False,
    xlimits: tuple[float, float] | None = None,
    from_zero: bool = False,
) -> str:
    """An SVG element with one line per series and a legend if there are several.

    `identity` makes the SVG's ids unique in the page. `percent` shows fractions as percentages, `zero_line`
    draws y = 0, `ordered` takes colours from faint to strong (early to late) instead of different hues,
    `from_zero` starts the y axis at 0. Raises ValueError without a series.
    """
    if not series:
        raise ValueError(f"figure {identity!r}: expected at least one series")
    colours = SEQUENCE[-len(series) :] if ordered else CATEGORIES
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": identity, "font.size": 8.5}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for line, colour in zip(series, colours, strict=False):
            marker = "o" if len(line.x) <= _MARKERS_UP_TO else None
            axes.plot(
                line.x, line.y, color=colour, label=line.label, linewidth=1.6, marker=marker, markersize=3.2
            )
        if zero_line:
            axes.axhline(0.0, color=INK, linewidth=0.7, alpha=0.5, zorder=1)
        style_axes(axes, xlabel, ylabel, percent=percent)
        if xlimits is not None:
            axes.set_xlim(*xlimits)
        if from_zero:
            axes.set_ylim(bottom=0.0)
        if len(series) > 1:
            figure.legend(
                loc="outside upper left", ncols=len(series), frameon=False, labelcolor=INK, handlelength=1.4
            )
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return inline_svg(
        buffer.getvalue(), identity, describe_lines(series, xlabel, ylabel, percent), _VARIABLES
    )


def style_axes(axes: Axes, xlabel: str, ylabel: str, *, percent: bool) -> None:
    """Give axes the look of all figures: labels, whole numbers on x, faint horizontal lines, no frame."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))


def inline_svg(svg: str, identity: str, description: str, variables: Mapping[str, str]) -> str:
    """A stand-alone SVG file as an element for the page: no header, own ids, scalable, described in text.

    `variables` maps each colour that the figure was drawn with (`#0a0b..`) to what the page has for it.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{identity}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{identity}-", svg)
    svg = re.sub(r"#0a0b[0-9a-f]{2}", lambda match: variables[match[0]], svg)
    head, body = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{html.escape(description)}">{body}'


def describe_lines(series: Sequence[Series], xlabel: str, ylabel: str, percent: bool) -> str:
    """One sentence per line: where it starts and where it ends."""

    def show(value: float) -> str:
        return f"{value:.1%}" if percent else f"{value:.4g}"

    parts = []
    for line in series:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
        if not points:
            parts.append(f"{line.label}: no finite value.")
            continue
        (first_x, first), (last_x, last) = points[0], points[-1]
        parts.append(
            f"{line.label}: {show(first)} at {xlabel} {first_x:g}, {show(last)} at {xlabel} {last_x:g}."
        )
    return f"Line chart of {ylabel} over {xlabel}. " + " ".join(parts)
