"""Which charts the report shows of each phase, as a table of metric names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vcppo_jax.run.figures import Series, line_chart

DECILES = 10


@dataclass(frozen=True)
class Chart:
    """A chart over steps: title, axis label with unit, and (metric, label) per line.

    A metric name that ends in "/" stands for the mean of the `acc/mean@k` metrics under it.
    """

    title: str
    ylabel: str
    lines: tuple[tuple[str, str], ...]
    percent: bool = False
    zero_line: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class DecileChart:
    """A chart over the position in the response: `name/decile_0` ... `name/decile_9` of three steps."""

    title: str
    ylabel: str
    name: str


@dataclass(frozen=True)
class Drawn:
    """A chart as it stands in the page."""

    title: str
    svg: Markup


_SCORE = Chart(
    "Score", "score", (("critic/score/mean", "score"), ("critic/rewards/mean", "score with penalties"))
)
_LENGTH = Chart(
    "Response length",
    "tokens",
    (("response_length/mean", "mean"), ("response_length/max", "longest")),
    from_zero=True,
)
_CLIP_RATIO = Chart(
    "Responses cut by the length limit",
    "share of responses",
    (("response_length/clip_ratio", "cut"),),
    percent=True,
)
_VALUE = (
    Chart(
        "Value loss",
        "loss, ½(V − R)²",
        (("critic/vf_loss", "sampled rollouts"), ("held_out/vf_loss", "held-out rollouts")),
    ),
    Chart(
        "Explained variance of the value model",
        "1 − Var(R − V) / Var(R)",
        (("critic/vf_explained_var", "sampled rollouts"), ("held_out/vf_explained_var", "held-out rollouts")),
        zero_line=True,
    ),
)
_VALUE_DECILES = DecileChart("Value by token position", "mean value", "critic/values")
_ADVANTAGE_DECILES = DecileChart("Advantage by token position", "mean advantage", "critic/advantages")

CHARTS: dict[str, tuple[Chart | DecileChart, ...]] = {
    "sft": (
        Chart("Loss", "nats per token", (("sft/loss", "loss"),)),
        Chart("Accuracy of the next token", "share of tokens", (("sft/accuracy", "accuracy"),), percent=True),
        Chart("Gradient norm", "norm", (("sft/grad_norm", "norm"),)),
    ),
    "reward": (
        Chart(
            "Loss",
            "−log σ(chosen − rejected)",
            (("reward/loss", "training"), ("held_out/loss", "held-out pairs")),
        ),
        Chart(
            "Pairs in the right order",
            "share of pairs",
            (("reward/acc", "training"), ("held_out/acc", "held-out pairs")),
            percent=True,
        ),
        Chart(
            "Margin",
            "chosen − rejected",
            (("reward/margin", "training"), ("held_out/margin", "held-out pairs")),
            zero_line=True,
        ),
        Chart("Gradient norm", "norm", (("reward/grad_norm", "norm"),)),
    ),
    "value": (*_VALUE, _VALUE_DECILES, _ADVANTAGE_DECILES, _SCORE, _LENGTH),
    "rl": (
        _SCORE,
        Chart(
            "Accuracy",
            "share of responses",
            (("critic/acc/mean", "samples in training"), ("val-core/", "held-out problems")),
            percent=True,
        ),
        _LENGTH,
        _CLIP_RATIO,
        *_VALUE,
        _ADVANTAGE_DECILES,
        _VALUE_DECILES,
        Chart("Clipped tokens", "share of tokens", (("actor/pg_clipfrac", "clipped"),), percent=True),
        Chart("KL to the sampling policy", "nats per token", (("actor/ppo_kl", "KL"),), zero_line=True),
        Chart("KL to the reference policy", "nats per token", (("actor/kl_loss", "KL"),), zero_line=True),
        Chart("Entropy of the policy", "nats per token", (("actor/entropy", "entropy"),)),
        Chart("Gradient norms", "norm", (("actor/grad_norm", "policy"), ("critic/grad_norm", "value model"))),
    ),
    "evaluate": (),
}
"""Charts of each phase in their order; those whose metrics are absent are left out."""


def _value(line: Mapping[str, Any], name: str) -> float | None:
    """The metric in a line of metrics, None if absent."""
    if not name.endswith("/"):
        return float(line[name]) if name in line else None
    found = [float(v) for k, v in line.items() if k.startswith(name) and "/acc/mean@" in k]
    return sum(found) / len(found) if found else None


def _over_steps(chart: Chart, metrics: Sequence[Mapping[str, Any]]) -> list[Series]:
    series: list[Series] = []
    for name, label in chart.lines:
        points = [(line["step"], value) for line in metrics if (value := _value(line, name)) is not None]
        values = [value if math.isfinite(value) else math.nan for _, value in points]
        repeats = any(
            values == other.y for other in series
        )  # rewards equal scores where nothing is penalised
        if any(math.isfinite(value) for value in values) and not repeats:
            series.append(Series(label, [step for step, _ in points], values))
    return series


def _over_positions(chart: DecileChart, metrics: Sequence[Mapping[str, Any]]) -> list[Series]:
    names = [f"{chart.name}/decile_{index}" for index in range(DECILES)]
    lines = [line for line in metrics if all(name in line for name in names)]
    chosen = sorted({0, len(lines) // 2, len(lines) - 1}) if lines else []
    centres = [100.0 * (index + 0.5) / DECILES for index in range(DECILES)]
    return [
        Series(f"step {lines[index]['step']}", centres, [float(lines[index][name]) for name in names])
        for index in chosen
    ]


def phase_charts(phase: str, metrics: Sequence[Mapping[str, Any]]) -> list[Drawn]:
    """The charts of a phase's metrics, as inline SVG; [] if it has none."""
    drawn = []
    for index, chart in enumerate(CHARTS[phase]):
        identity = f"{phase}-{index}"
        if isinstance(chart, Chart):
            if not (series := _over_steps(chart, metrics)):
                continue
            svg = line_chart(
                series,
                identity=identity,
                xlabel="step",
                ylabel=chart.ylabel,
                percent=chart.percent,
                zero_line=chart.zero_line,
                from_zero=chart.from_zero,
            )
        else:
            if not (series := _over_positions(chart, metrics)):
                continue
            svg = line_chart(
                series,
                identity=identity,
                xlabel="position in the response (%)",
                ylabel=chart.ylabel,
                zero_line=True,
                ordered=True,
                xlimits=(0.0, 100.0),
            )
        drawn.append(Drawn(chart.title, Markup(svg)))
    return drawn
