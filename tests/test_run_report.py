from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from vcppo_jax.run.figures import Series, line_chart
from vcppo_jax.run.metrics import MetricsWriter, StepLog
from vcppo_jax.run.report import evaluation_table, headline, read_phase, timing, write_report
from vcppo_jax.run.report_charts import phase_charts
from vcppo_jax.run.report_samples import pick_samples, split_thinking

CONFIG = "phases: [sft, value, rl, evaluate]\nmodel: {path: 'builtin:tiny'}\nrl: {steps: 6}\n"


class Page(HTMLParser):
    """What tests need of a page: ids, tags with attributes, and visible text."""

    VOID = frozenset({"meta", "path", "use", "br", "rect", "link"})

    def __init__(self, path):
        super().__init__()
        self.ids, self.tags, self.open, self.words = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.open += [] if tag in self.VOID else [tag]
        if "id" in attributes:
            self.ids.append(attributes["id"])

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open = self.open if tag in self.VOID else self.open[:-1]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def charts(self):
        return [attributes["aria-label"] for tag, attributes in self.tags if tag == "svg"]


def deciles(name, start, slope):
    return {f"critic/{name}/decile_{index}": start + slope * index for index in range(10)}


def write_phase(run_dir, phase, lines, samples=()):
    with MetricsWriter(run_dir / phase, resume_step=None, tensorboard=False, wandb=None) as writer:
        for step, line in enumerate(lines, start=1):
            writer.write(step, line)
    log = StepLog(run_dir / phase / "samples.jsonl", resume_step=None)
    for sample in samples:
        log.append(sample)
    log.close()


def sample(step=1, response="<think>1 + 1</think>\\boxed{2}", reason="correct", **over):
    return {
        "step": step,
        "prompt": "What is 1 + 1?",
        "response": response,
        "gold": "2",
        "score": 1.0 if reason == "correct" else -1.0,
        "reason": reason,
        "length": 9,
        "truncated": reason == "truncated",
        **over,
    }


@pytest.fixture
def run_dir(tmp_path):
    """A run of four phases, six steps of RL."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    accuracy = "val-core/running_sum/acc/mean@1"
    write_phase(tmp_path, "sft", [{"sft/loss": 2.0}, {"sft/loss": 0.5, accuracy: 0.148}])
    value = [{"critic/vf_loss": 1 / s, "critic/vf_explained_var": -1 / s} for s in range(1, 5)]
    write_phase(tmp_path, "value", [{**line, **deciles("values", -1.5, 0.1)} for line in value])
    rl = [
        {
            "critic/score/mean": -1 + s / 3,
            "critic/rewards/mean": -1 + s / 3,
            "critic/acc/mean": s / 6,
            "response_length/mean": 20.0 + s,
            "response_length/max": 27,
            "response_length/clip_ratio": 0.0,
            "critic/vf_loss": math.nan if s == 3 else 0.1,
            "actor/entropy": 0.5,
            "timing_s/step": 2.0,
            "timing_s/gen": 1.5,
            **deciles("advantages", 0.5, -0.1 / s),
            **deciles("values", 0.1 * s, 0.05),
        }
        for s in range(1, 7)
    ]
    write_phase(tmp_path, "rl", rl, [sample(step) for step in range(1, 7)])
    write_phase(tmp_path, "evaluate", [{accuracy: 0.945, "val-core/aime/2024/acc/mean@1": 0.1}], [sample()])
    return tmp_path


def test_page_of_a_whole_run(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = Page(path)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    for part in ("14.8% → 94.5%", "21.0 → 26.0", "Cold start", "Value-pretraining", "running_sum", "6 steps"):
        assert part in page.text, part
    assert "Not complete" not in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 12
    assert all(attributes.get("role") == "img" for tag, attributes in page.tags if tag == "svg")
    assert any("score" in chart and "-0.6667 at step 1, 1 at step 6" in chart for chart in page.charts())
    assert any("longest: 27 at step 1" in chart for chart in page.charts())
    (advantages,) = [chart for chart in page.charts() if "mean advantage" in chart]
    assert re.findall(r"step (\d+):", advantages) == ["1", "4", "6"]
    for tag, attributes in page.tags:
        assert tag != "th" or "scope" in attributes


def test_page_needs_nothing_from_outside(run_dir):
    text = write_report(run_dir).read_text(encoding="utf-8")
    page = Page(run_dir / "report.html")
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert re.search(r"@import|url\((?!#)", text) is None
    references = [
        v for _, attributes in page.tags for k, v in attributes.items() if k.split(":")[-1] == "href"
    ]
    assert references
    assert all(reference.startswith("#") and reference[1:] in page.ids for reference in references)
    assert "#0a0b" not in text  # every colour of a figure became a variable of the page
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", text))
    assert used <= set(re.findall(r"(--[a-z0-9-]+):", text))


def test_text_of_a_model_is_text(tmp_path):
    evil = {where: f"<script>{where}</script>&amp;" for where in ("prompt", "response", "gold", "reason")}
    write_phase(tmp_path, "rl", [{"<b>name</b>": 1.0}], [sample(**evil)])
    page = Page(write_report(tmp_path))
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    for text in (*evil.values(), "<b>name</b>"):
        assert text in page.text, text


def test_empty_directory_says_what_is_missing(tmp_path):
    page = Page(write_report(tmp_path))
    assert "holds no run yet" in page.text
    with pytest.raises(FileNotFoundError, match="expected the directory of a run"):
        write_report(tmp_path / "absent")


def test_half_a_run_says_what_is_missing(run_dir):
    write_phase(run_dir, "rl", [{"critic/score/mean": 0.0}, {"critic/score/mean": 0.5}])
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run_dir / "evaluate" / name).unlink()
        (run_dir / "value" / name).unlink()
    (run_dir / "evaluate").rmdir()
    (run_dir / "sft" / "metrics.jsonl").write_text('{"step": 1,\n{"step": 2, "sft/loss": 1.0}\n')
    (run_dir / "sft" / "summary.json").write_text("{")
    page = Page(write_report(run_dir))
    for part in (
        "Reinforcement learning (rl) is at step 2 of 6.",
        "Evaluation (evaluate) has not run.",
        "Value-pretraining (value) has no metrics yet.",
        "metrics.jsonl:1: expected a JSON object",
        "summary.json:",
        "0.000 → +0.500",
    ):
        assert part in page.text, part


def test_damaged_config_and_odd_values_do_not_stop_the_page(run_dir):
    for name in ("sft", "value"):
        (run_dir / name / "metrics.jsonl").unlink()
    (run_dir / "config.yaml").write_text("phases: [")
    (run_dir / "rl" / "metrics.jsonl").write_text('{"step": 1, "note": "by hand", "critic/vf_loss": "NaN"}\n')
    page = Page(write_report(run_dir))
    assert "config.yaml is not there or cannot be read." in page.text


def test_accuracy_compares_the_same_sources(run_dir):
    def tile():
        return headline({name: read_phase(run_dir / name) for name in ("sft", "rl", "evaluate")})[0]

    assert (tile().before, tile().after) == ("14.8%", "94.5%")  # aime/2024 was not measured before
    (run_dir / "sft" / "metrics.jsonl").unlink()
    assert (tile().before, tile().after) == ("16.7%", "100.0%")
    assert "samples in training" in tile().note
    (run_dir / "rl" / "metrics.jsonl").unlink()
    assert (tile().before, tile().after) == (None, "52.2%")


def test_summary_goes_over_the_last_line(tmp_path):
    accuracy = "val-core/running_sum/acc/mean@1"
    write_phase(tmp_path, "evaluate", [{accuracy: 0.1}])
    (tmp_path / "evaluate" / "summary.json").write_text(json.dumps({accuracy: 0.5, "problems": 512}))
    page = Page(write_report(tmp_path))
    assert "Accuracy 50.0% held-out problems, in the evaluation" in page.text
    assert "problems 512" in page.text


def test_evaluation_table_takes_sources_with_slashes():
    columns, rows = evaluation_table(
        {
            "step": 3,
            "val-core/aime/2024/acc/mean@32": 0.4125,
            "val-core/aime/2024/acc/best@32": 0.7,
            "val-aux/gpqa/response_length/mean": 812.25,
            "critic/score/mean": 0.0,
        }
    )
    assert columns == ["acc mean@32", "acc best@32", "response_length mean"]
    assert rows == [["aime/2024", "41.2%", "70.0%", ""], ["gpqa", "", "", "812.2"]]


def test_timing_accounts_for_the_whole_step():
    seconds, stages = timing([{"timing_s/step": 4.0, "timing_s/gen": 1.0, "timing_s/update_actor": 2.0}] * 2)
    assert seconds == 8.0
    assert [(s.name, s.seconds, s.share) for s in stages] == [
        ("update_actor", 4.0, 0.5),
        ("gen", 2.0, 0.25),
        ("other", 2.0, 0.25),
    ]
    assert timing([{"timing_s/gen": 3.0, "timing_s/x": 1.0}])[0] == 4.0
    assert timing([{"a": 1.0}]) == (0, [])


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ("p", "<think>a</think> b", ("a", "b")),
        ("p", "<think>a</think>b</think>c", ("a</think>b", "c")),
        ("p", "<think>cut", ("cut", "")),
        ("p <think>\n", "cut", ("cut", "")),
        ("p <think>\n", "a</think>b", ("a", "b")),
        ("p", "plain", (None, "plain")),
    ],
)
def test_thinking_is_set_apart(prompt, response, expected):
    assert split_thinking(prompt, response) == expected


def test_samples_show_every_outcome_of_first_middle_and_last_step():
    lines = [sample(step, reason=reason) for step in range(1, 8) for reason in ("wrong", "wrong", "correct")]
    picked = pick_samples(lines, per_step=2)
    assert [(s.step, s.reason) for s in picked] == [
        (step, reason) for step in (1, 4, 7) for reason in ("wrong", "correct")
    ]
    assert [s.good for s in picked[:2]] == [False, True]
    (long,) = pick_samples([sample(response="x" * 100_000)], per_step=1)
    assert len(long.answer) < 7_000
    assert "94000 characters left out" in long.answer
    assert pick_samples([], per_step=2) == []


def test_charts_leave_out_what_is_absent_and_break_at_nan():
    assert phase_charts("rl", [{"step": 1, "actor/lr": 1.0}]) == []
    drawn = phase_charts(
        "rl", [{"step": s, "critic/vf_loss": math.nan if s == 2 else 1.0} for s in (1, 2, 3)]
    )
    assert [chart.title for chart in drawn] == ["Value loss"]
    assert phase_charts("rl", [{"step": 1, "critic/vf_loss": math.inf}]) == []
    scores = [{"step": s, "critic/score/mean": 0.1 * s, "critic/rewards/mean": 0.1 * s} for s in (1, 2)]
    assert "with penalties" not in phase_charts("rl", scores)[0].svg
    scores[0]["critic/rewards/mean"] = -1.0
    assert "with penalties" in phase_charts("rl", scores)[0].svg


def test_chart_is_the_same_each_time_and_leaves_settings_alone():
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    series = [Series("a<b", [1, 2, 3], [0.1, 0.2, math.nan]), Series("c", [1], [0.5])]
    first, second = (
        line_chart(series, identity="x", xlabel="step", ylabel="y", percent=True) for _ in range(2)
    )
    assert first == second
    assert dict(matplotlib.rcParams) == before
    assert "a&lt;b: 10.0% at step 1, 20.0% at step 2." in first
    with pytest.raises(ValueError, match="'x': expected at least one series"):
        line_chart([], identity="x", xlabel="step", ylabel="y")


def test_report_runs_without_jax(tmp_path):
    write_phase(tmp_path, "sft", [{"sft/loss": 1.0}, {"sft/loss": 0.5}])
    program = (
        "import sys\n"
        "from vcppo_jax.run.report import write_report\n"
        "write_report(sys.argv[1])\n"
        "heavy = {'jax', 'torch', 'matplotlib.pyplot', 'tensorboardX', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
