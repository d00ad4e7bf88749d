from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import termios

import pytest

from vcppo_jax.run.progress import PLAIN_INTERVAL_S, Progress, format_duration, key_metrics, summary_table

RL = {
    "critic/score/mean": 0.25,
    "critic/acc/mean": 0.625,
    "response_length/mean": 23.46,
    "critic/vf_loss": 0.10551,
    "critic/vf_explained_var": -0.4,
    "actor/lr": 1e-6,
}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def plain():
    clock, file = Clock(), io.StringIO()
    return Progress(file, clock=clock), clock, lambda: file.getvalue().splitlines()


def test_key_metrics_take_what_is_there():
    assert key_metrics(RL) == [
        ("score", "+0.250"),
        ("acc", "62.5%"),
        ("length", "23.5"),
        ("value loss", "0.1055"),
        ("expl. var.", "-0.400"),
    ]
    assert key_metrics({"sft/loss": 1.5, "sft/accuracy": 0.5}) == [("loss", "1.5"), ("acc", "50.0%")]
    held_out = {"val-core/a/acc/mean@2": 0.5, "val-core/b/acc/mean@2": 1.0, "val-core/a/acc/best@2": 9.0}
    assert key_metrics(held_out) == [("held-out acc", "75.0%")]


def test_durations():
    assert [format_duration(s) for s in (None, 0, 59.6, 3599, 3600, 90061)] == [
        "-:--",
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]


def test_plain_lines_show_phase_step_metrics_and_times(plain):
    progress, clock, lines = plain
    progress.start("rl", 40, 10)
    clock.now = 100.0  # compiles
    progress.update(11, RL)
    clock.now = 104.0
    progress.update(12, RL)
    shown = "score +0.250  acc 62.5%  length 23.5  value loss 0.1055  expl. var. -0.400"
    assert lines() == [
        "rl: 40 steps, 10 done before",
        f"rl 11/40  {shown}  1:40 eta 48:20",
        f"rl 12/40  {shown}  1:44 eta 1:52",  # the first step no longer counts: 28 steps of 4 s
    ]


def test_plain_lines_are_limited_but_the_last_step_is_there(plain):
    progress, clock, lines = plain
    progress.start("sft", 100)
    for step in range(1, 101):
        clock.now += 0.1
        progress.update(step, {})
    shown = [int(re.match(r"sft (\d+)/100", line)[1]) for line in lines()[1:]]
    assert shown[0] == 1
    assert shown[-1] == 100
    assert 4 <= len(shown) <= 2 + 100 * 0.1 / PLAIN_INTERVAL_S


def test_long_stages_report_a_rate(plain):
    progress, clock, lines = plain
    progress.start("value", 5)
    for done in range(0, 1000, 10):
        progress.substep("sampling", done, 1000)
        clock.now += 1.0
    assert lines()[1] == "value 0/5  sampling 50/1000 (10/s)"
    assert 6 <= len(lines()) <= 9
    progress.substep("scoring", 0, 3)
    assert "scoring" not in lines()[-1]  # a short stage says nothing


def test_message_prints_markup_as_it_is(plain):
    progress, _, lines = plain
    progress.message("[red]skipped[/red] update 3")
    progress.start("rl", 1)
    progress.message("a [b] c")
    progress.close()
    progress.close()
    assert lines() == ["[red]skipped[/red] update 3", "rl: 1 steps", "a [b] c"]


def test_characters_that_the_output_lacks_do_no_harm():
    raw = io.BytesIO()
    progress = Progress(io.TextIOWrapper(raw, encoding="ascii"))
    progress.message("écart λ")
    assert raw.getvalue() == b"?cart ?\n"


PROGRAM = """
import time
from vcppo_jax.run.progress import Progress, summary_table
metrics = {metrics!r}
with Progress() as progress:
    progress.start("rl", 3, 1)
    progress.update(2, metrics)
    progress.substep("sampling", 512, 1024)
    progress.message("message [x]")
    time.sleep(0.3)
    progress.update(3, metrics)
summary_table([["accuracy", "12.5 %", "93.0 %"]], headers=["", "before", "after"])
"""


def run_on_terminal(columns, **environment):
    """What the program writes to a terminal `columns` wide."""
    main, side = pty.openpty()
    termios.tcsetwinsize(side, (24, columns))
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(metrics=RL)],
        stdin=side,
        stdout=side,
        stderr=side,
        env={**env, "TERM": "xterm-256color", **environment},
    )
    os.close(side)
    output = b""
    while select.select([main], [], [], 30)[0]:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(main)
    assert process.wait(timeout=30) == 0, output.decode()
    return output.decode()


def visible(output):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def test_bar_on_a_terminal():
    output = run_on_terminal(100)
    text = visible(output)
    for part in ("━", "2/3", "3/3", "score +0.250", "sampling 512/1024", "message [x]", "eta", "93.0 %"):
        assert part in text, text
    assert text.count("message [x]") == 1
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is shown again


@pytest.mark.parametrize("columns", [24, 50])
def test_bar_on_a_narrow_terminal_wraps_nothing(columns):
    text = visible(run_on_terminal(columns))
    progress_lines = text.split("┏")[0].replace("\r", "\n").split("\n")
    assert not any("━" in line for line in progress_lines)
    assert max(map(len, progress_lines)) <= columns
    assert any("score" in line and line.endswith("…") for line in progress_lines)
    assert any("3/3" in line for line in progress_lines)


def test_no_color_leaves_no_colours():
    output = run_on_terminal(100, NO_COLOR="1")
    assert "━" in output
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m|\x1b\[[0-9;]*38;", output) is None
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m|\x1b\[[0-9;]*38;", run_on_terminal(100)) is not None


def test_dumb_terminal_gets_plain_lines():
    output = run_on_terminal(100, TERM="dumb")
    assert "\x1b" not in output
    assert "rl 3/3  score +0.250" in output


def test_piped_output_is_plain_even_if_colour_is_forced():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(metrics=RL)],
        capture_output=True,
        check=True,
        env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "40"},
    )
    assert b"\x1b" not in result.stdout
    assert b"\r" not in result.stdout.replace(os.linesep.encode(), b"\n")
    lines = result.stdout.decode("ascii").splitlines()
    assert lines[0] == "rl: 3 steps, 1 done before"
    assert lines[-3:] == [
        "          before   after",
        "--------  ------  ------",
        "accuracy  12.5 %  93.0 %",
    ]


def test_summary_table_counts_cells():
    with pytest.raises(ValueError, match="expected 2 cells, got 1"):
        summary_table([["a"]], headers=["x", "y"], file=io.StringIO())
