"""Progress that a user sees all along: a live bar on a terminal, plain lines where the output is piped.

Plain lines have no carriage returns, no escape codes and ASCII only, so a log file of them reads well; they
are also what TERM=dumb and notebooks get. NO_COLOR is respected by the bar.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from vcppo_jax.run.files import writing

KEY_METRICS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("loss", ("sft/loss", "reward/loss"), ".4g"),
    ("score", ("critic/score/mean",), "+.3f"),
    ("acc", ("critic/acc/mean", "sft/accuracy", "reward/acc"), ".1%"),
    ("held-out acc", ("val-core/",), ".1%"),
    ("length", ("response_length/mean",), ".1f"),
    ("value loss", ("critic/vf_loss",), ".4g"),
    ("expl. var.", ("critic/vf_explained_var",), "+.3f"),
)
"""What the bar shows: label, names of the metric (the first that is there), format. A name that ends in "/"
stands for the mean of the `mean@k` metrics under it."""

PLAIN_INTERVAL_S = 2.0
"""Seconds between plain lines of steps, at least; the first and last step are printed always."""
PLAIN_SUBSTEP_INTERVAL_S = 15.0
"""Seconds between plain lines inside a step, at least."""
_RECENT_STEPS = 20
_NARROW = 60


def key_metrics(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, formatted value) of the metrics in KEY_METRICS that are there."""
    shown = []
    for label, names, form in KEY_METRICS:
        for name in names:
            if name.endswith("/"):
                found = [v for k, v in metrics.items() if k.startswith(name) and "/mean@" in k]
            else:
                found = [metrics[name]] if name in metrics else []
            if found:
                shown.append((label, format(fmean(float(value) for value in found), form)))
                break
    return shown


def format_duration(seconds: float | None) -> str:
    """Seconds as `0:42`, `12:03` or `3:07:00`; `-:--` for None."""
    if seconds is None:
        return "-:--"
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _TimesColumn(ProgressColumn):
    """Elapsed and remaining time of the phase."""

    max_refresh = 0.5

    def __init__(self, times: Callable[[], tuple[float, float | None]]) -> None:
        super().__init__()
        self._times = times

    def render(self, task: Task) -> Text:
        """The two times of the task's phase."""
        elapsed, remaining = self._times()
        return Text(f"{format_duration(elapsed)} eta {format_duration(remaining)}", style="dim", no_wrap=True)


class _Bar(RichProgress):
    """A bar with lines of metrics and of the current stage under it, each cut at the terminal's width."""

    below: tuple[Text, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, left out where the terminal is narrow, and the lines below it."""
        narrow = hasattr(self, "live") and self.console.width < _NARROW  # rich's constructor calls this first
        shown = self.columns
        self.columns = tuple(c for c in shown if not (narrow and isinstance(c, BarColumn)))
        try:
            yield self.make_tasks_table(self.tasks)
        finally:
            self.columns = shown
        yield from self.below


class Progress:
    """Shows phases one after the other: `start`, then `update` after each step, then `close`.

    `substep` reports from inside a step (sampling, scoring) and `message` prints a line for good. The
    remaining time comes from the mean duration of the last 20 steps, the first of the phase (it compiles)
    left out as soon as there is another.
    """

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to `file` (stdout if None). `live` forces the bar or the lines; None looks at the file."""
        self._file = sys.stdout if file is None else file
        self._live = is_live(self._file) if live is None else live
        self._clock = clock
        self._bar: _Bar | None = None
        self._phase = ""
        self._total = self._done = self._updates = 0
        self._started_at = self._step_at = clock()
        self._printed_at = self._substep_printed_at = float("-inf")
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._metrics_line: Text | None = None
        self._substep: tuple[str, int, float] | None = None

    @property
    def phase(self) -> str:
        """The phase that was started last; "" before the first."""
        return self._phase

    def start(self, phase: str, total: int, initial: int = 0) -> None:
        """Begin a phase of `total` steps, `initial` of them done before (a resume)."""
        self.close()
        self._phase, self._total, self._done, self._updates = phase, total, initial, 0
        self._started_at = self._step_at = self._clock()
        self._printed_at = self._substep_printed_at = float("-inf")
        self._durations = deque(maxlen=_RECENT_STEPS)
        self._metrics_line = self._substep = None
        if not self._live:
            self._line(f"{phase}: {total} steps" + (f", {initial} done before" if initial else ""))
            return
        self._bar = _Bar(
            TextColumn("[bold]{task.description}", markup=True),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _TimesColumn(self._times),
            console=Console(file=self._file, force_terminal=True),
            expand=True,
            refresh_per_second=5,
        )
        self._bar.add_task(phase, total=total, completed=initial)
        self._bar.start()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Say that `step` (counted from 1) is done, with its metrics; KEY_METRICS of them are shown."""
        now = self._clock()
        if self._updates == 1:
            self._durations.clear()  # the first step compiled
        self._updates += 1
        self._durations.append((now - self._step_at) / max(1, step - self._done))
        self._step_at, self._done, self._substep = now, step, None
        shown = key_metrics(metrics)
        if self._bar is not None:
            self._metrics_line = _metrics_text(shown)
            self._bar.update(self._bar.task_ids[0], completed=step)
            self._redraw()
        elif now - self._printed_at >= PLAIN_INTERVAL_S or step >= self._total:
            self._printed_at = now
            elapsed, remaining = self._times()
            parts = [f"{self._phase} {step}/{self._total}", *(f"{label} {value}" for label, value in shown)]
            times = f"{format_duration(elapsed)} eta {format_duration(remaining)}"
            self._line("  ".join([*parts, times]))

    def substep(self, text: str, done: int, total: int) -> None:
        """Report from inside a step: `done` of `total` of a stage such as "sampling", with its rate."""
        now = self._clock()
        if self._substep is None or self._substep[0] != text or done < self._substep[1]:
            self._substep = (text, done, now)
            self._substep_printed_at = max(self._substep_printed_at, now - PLAIN_SUBSTEP_INTERVAL_S + 5.0)
        _, first, began = self._substep
        rate = f" ({(done - first) / (now - began):.3g}/s)" if now > began and done > first else ""
        line = f"{text} {done}/{total}{rate}"
        if self._bar is not None:
            self._redraw(line)
        elif now - self._substep_printed_at >= PLAIN_SUBSTEP_INTERVAL_S:
            self._substep_printed_at = now
            self._line(f"{self._phase} {self._done}/{self._total}  {line}")

    def message(self, text: str) -> None:
        """Print `text` for good: above the bar, or as a line of its own."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._line(text)

    def close(self) -> None:
        """End the phase and give the terminal back; the bar stays. A second call does nothing."""
        if self._bar is not None:
            self._substep = None
            self._redraw()
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        """The object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, so that an exception leaves the cursor visible."""
        self.close()

    def _times(self) -> tuple[float, float | None]:
        """Seconds since the phase started here, and expected until its end (None before the first step)."""
        now = self._clock()
        if not self._durations:
            return now - self._started_at, None
        left = fmean(self._durations) * (self._total - self._done) - (now - self._step_at)
        return now - self._started_at, max(0.0, left)

    def _redraw(self, stage: str | None = None) -> None:
        """Set the lines below the bar."""
        assert self._bar is not None
        lines = [] if self._metrics_line is None else [self._metrics_line]
        if stage is not None:
            lines.append(Text(f"  {stage}", style="dim", no_wrap=True, overflow="ellipsis"))
        self._bar.below = tuple(lines)

    def _line(self, text: str) -> None:
        write_plain(self._file, text)


class Warnings(logging.Handler):
    """Shows the package's warnings (a damaged checkpoint that is passed over) above the progress bar."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        self._progress.message(record.getMessage())

    def __enter__(self) -> Self:
        """Take over the package's logger."""
        logger = logging.getLogger("vcppo_jax")
        logger.addHandler(self)
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        logger = logging.getLogger("vcppo_jax")
        logger.removeHandler(self)
        logger.propagate = True


def _metrics_text(shown: Sequence[tuple[str, str]]) -> Text | None:
    """The metrics on one line, labels dim; None if there are none."""
    if not shown:
        return None
    text = Text("  ", no_wrap=True, overflow="ellipsis")
    for index, (label, value) in enumerate(shown):
        text.append(("   " if index else "") + label + " ", style="dim")
        text.append(value)
    return text


def is_live(file: TextIO) -> bool:
    """Whether `file` is a terminal that can redraw lines: a tty whose TERM is neither dumb nor unknown."""
    return file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def write_plain(file: TextIO, text: str) -> None:
    """Write a line and flush; characters that the file's encoding lacks become "?". Raises WriteError."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    with writing(getattr(file, "name", "the output")):
        file.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
        file.flush()


def summary_table(
    rows: Sequence[Sequence[str]], *, headers: Sequence[str], file: TextIO | None = None
) -> None:
    """Print a short table: with lines on a terminal, as aligned plain text where piped.

    Each row has as many cells as `headers` (ValueError otherwise). The first column is aligned left, the
    others right.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"expected {len(headers)} cells, got {len(row)}: {list(row)!r}")
    file = sys.stdout if file is None else file
    if is_live(file):
        table = Table(header_style="bold")
        for index, header in enumerate(headers):
            table.add_column(Text(header), justify="right" if index else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console(file=file, force_terminal=True).print(table)
        return
    cells = [list(headers), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        write_plain(file, "  ".join([first, *rest]).rstrip())
