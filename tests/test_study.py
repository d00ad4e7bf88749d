"""`vcppo study`: configurations, resume, failures, statistics, and the page."""

import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.sharding import NamedSharding, PartitionSpec
from test_run_report import Page

from vcppo_jax import cli
from vcppo_jax.config_load import ConfigError
from vcppo_jax.phases import pipeline
from vcppo_jax.phases.evaluate import accuracy
from vcppo_jax.phases.loop import Interrupted, StepResult, write_json
from vcppo_jax.phases.study import read_study, run_study, write_page
from vcppo_jax.run.metrics import read_metrics
from vcppo_jax.run.study_report import cell
from vcppo_jax.run.study_results import Curve, Quantity, Statistic
from vcppo_jax.train.learner import NonFiniteError

ROOT = Path(__file__).parents[1]
BASE = """
run_dir: unused
model: {path: "builtin:tiny", init: random}
mesh: {fsdp: -1}
data: {train: "task:running_sum", task: {digits: 3}}
rl: {steps: 2, prompts_per_step: 8, mini_batch_size: 4, evaluate_every: 1}
value: {steps: 4, prompts_per_step: 8, mini_batch_size: 8, checkpoint_steps: [2]}
sft: {steps: 2}
verifier: {workers: 1}
logging: {tensorboard: false}
"""
STUDY = {
    "base": "base.yaml",
    "seeds": [0, 1],
    "stages": {
        "sft": {"phases": ["sft"]},
        "value": {"phases": ["value"], "model": {"path": "{sft}", "init": "pretrained"}},
    },
    "arms": {
        "ppo": {
            "label": "PPO",
            "settings": {
                "phases": ["rl"],
                "model": {"path": "{sft}"},
                "algorithm": {"lambda_actor": 0.9, "lambda_critic": 0.9},
            },
        },
        "vcppo": {
            "label": "VC-PPO",
            "settings": {
                "phases": ["rl", "evaluate"],
                "model": {"path": "{sft}"},
                "algorithm": {"lambda_actor": 0.9},
                "value_model": {"init": "checkpoint", "path": "{value}/checkpoints/2"},
            },
        },
    },
    "tables": [{"title": "Table 2: parts", "claim": "PPO <collapses>.", "arms": ["ppo", "vcppo"]}],
    "figures": [
        {"kind": "curves", "title": "Fig. 1: both", "arms": ["ppo", "vcppo"],
         "metrics": ["response_length/mean", "held_out/accuracy"]},
        {"kind": "positions", "title": "Fig. 2: bias", "arms": ["ppo", "vcppo"]},
        {"kind": "reward_decay", "title": "Fig. 3: decay", "arms": ["ppo"]},
        {"kind": "value_loss", "title": "Fig. 6: stages", "stages": ["value"],
         "metrics": ["held_out/vf_loss"]},
    ],
}  # fmt: skip


def write_study_file(directory, change=lambda study: None):
    """The study's file in `directory`, with what `change` does to it; runs go to `directory`/out."""
    (directory / "base.yaml").write_text(BASE)
    study = json.loads(json.dumps(STUDY)) | {"out_dir": str(directory / "out")}
    change(study)
    file = directory / "parts.yaml"
    file.write_text(yaml.safe_dump(study, sort_keys=False))
    return file


def without_figures(study):
    """Most of a page's time is drawing."""
    study["figures"] = []


def read(directory, change=lambda study: None):
    return read_study(write_study_file(directory, change))


def set_arm(name, **settings):
    return lambda study: study["arms"][name]["settings"].update(settings)


# The file.


def test_every_run_has_its_directory_seed_settings_and_stages(tmp_path):
    def change(study):
        study["settings"] = {"rl": {"steps": 3}}
        study["arms"]["vcppo"]["settings"]["rl"] = {"steps": 5}

    plan = read(tmp_path, change)
    names = ["stage sft", "stage value", "arm ppo", "arm vcppo"]
    assert [str(run) for run in plan.runs] == [f"{name} seed {seed}" for seed in (0, 1) for name in names]
    ppo, vcppo = plan.of("arm", "ppo")[1], plan.of("arm", "vcppo")[1]
    out = tmp_path / "out"
    assert ppo.config.run_dir == str(out / "arms" / "ppo" / "seed_1")
    assert ppo.config.model.path == str(out / "stages" / "sft" / "seed_1" / "sft")
    assert vcppo.config.value_model.path == str(out / "stages/value/seed_1/value/checkpoints/2")
    assert (ppo.needs, vcppo.needs) == (("sft",), ("sft", "value"))
    assert (ppo.config.seed, ppo.config.rl.steps, ppo.config.rl.mini_batch_size) == (1, 3, 4)
    assert vcppo.config.rl.steps == 5
    assert (ppo.config.algorithm.lambda_critic, vcppo.config.algorithm.lambda_critic) == (0.9, 1.0)


def test_settings_include_presets_beneath_their_own_keys(tmp_path):
    (tmp_path / "presets").mkdir()
    preset = "algorithm: {clip_low: 0.1, clip_high: 0.5}\nrl: {steps: 9}\n"
    (tmp_path / "presets" / "dapo.yaml").write_text(preset)
    change = set_arm("ppo", include=["presets/dapo.yaml"], rl={"steps": 5})
    config = read(tmp_path, change).of("arm", "ppo")[0].config
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 0.5)
    assert (config.rl.steps, config.algorithm.lambda_actor) == (5, 0.9)


def move_value_first(study):
    study["stages"] = {name: study["stages"][name] for name in ("value", "sft")}


FAULTS = {
    "bad value": (set_arm("vcppo", rl={"steps": 0}), r"parts\.yaml: arm 'vcppo': rl\.steps: .*got 0"),
    "bad key": (
        set_arm("ppo", rl={"stepz": 1}),
        r"arm 'ppo': unknown key 'rl\.stepz'; did you mean 'rl\.steps'",
    ),
    "bad combination": (
        set_arm("ppo", algorithm={"advantage": "grpo"}),
        r"arm 'ppo': .*compares the samples of a prompt: set rollout\.n",
    ),
    "unknown stage": (
        set_arm("ppo", model={"path": "{stf}"}),
        r"arm 'ppo': '\{stf\}': 'stf' is no stage; there are sft, value",
    ),
    "later stage": (move_value_first, r"stage 'value': '\{sft\}': 'sft' is a later stage; there are none"),
    "no such checkpoint": (
        set_arm("vcppo", value_model={"init": "checkpoint", "path": "{value}/checkpoints/3"}),
        r"arm 'vcppo': .* stage 'value' keeps the checkpoints of steps 2, 4",
    ),
    "seed": (set_arm("ppo", seed=3), r"arm 'ppo': seed is set by the study"),
    "missing preset": (set_arm("ppo", include=["no.yaml"]), r"arm 'ppo': .*no\.yaml: cannot read"),
    "unknown arm in a table": (
        lambda study: study["tables"][0].update(arms=["grpo"]),
        r"tables\.0\.arms: no arm 'grpo' in 'Table 2: parts'; there are ppo, vcppo",
    ),
    "unknown stage in a figure": (
        lambda study: study["figures"][3].update(stages=["reward"]),
        r"figures\.3\.stages: no stage 'reward' .* there are sft, value",
    ),
    "unknown metric": (
        lambda study: study["figures"][0].update(metrics=["response_length/means"]),
        r"figure 'Fig\. 1: both': unknown metric .*; did you mean 'response_length/mean'",
    ),
    "metrics where none are read": (
        lambda study: study["figures"][1].update(metrics=["actor/entropy"]),
        r"figures\.1: a figure of kind positions takes no metrics",
    ),
    "no metrics": (
        lambda study: study["figures"][0].pop("metrics"),
        r"figures\.0: a figure of kind curves needs metrics",
    ),
    "unknown key": (
        lambda study: study.update(seedz=[1]),
        r"parts\.yaml: unknown key 'seedz'; did you mean 'seeds'",
    ),
    "seed twice": (lambda study: study.update(seeds=[1, 1]), r"seeds: each once, got 1, 1"),
    "name": (lambda study: study["arms"].update({"a/b": study["arms"]["ppo"]}), r"arms\.a/b"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_that_names_where_it_is(tmp_path, fault):
    change, message = FAULTS[fault]
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, change)
    assert len(str(caught.value).splitlines()) == 1


def test_nothing_runs_where_one_of_several_studies_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_configure_jax", lambda: None)
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    right = write_study_file(tmp_path / "right")
    wrong = write_study_file(tmp_path / "wrong", set_arm("ppo", rl={"steps": 0}))
    assert cli.main(["study", str(right), str(wrong)]) == 1
    assert "arm 'ppo': rl.steps" in capsys.readouterr().err
    assert not (tmp_path / "right" / "out").exists()


@pytest.mark.parametrize("file", ["vcppo", "lite_ppo"])
def test_the_committed_studies_are_valid(file):
    plan = read_study(ROOT / "configs" / "study" / f"{file}.yaml")
    assert len(plan.study.seeds) >= 3
    shown = {arm for part in (*plan.study.tables, *plan.study.figures) for arm in part.arms}
    assert shown == set(plan.study.arms)


def test_help_explains_every_key(capsys):
    with pytest.raises(SystemExit):
        cli.main(["study", "--help"])
    text = capsys.readouterr().out
    for key in ("out_dir", "base", "seeds", "arms.NAME.settings", "tables.N.claim", "figures.N.kind"):
        assert f"  {key}  (" in text


# Running. The phases are small stand-ins in the real loop: no model, but checkpoints, signals and files.


def accuracy_of(arm, seed, step):
    """Held-out accuracy of the stand-in."""
    return {"ppo": 0.3 - 0.1 * step, "vcppo": 0.3 + 0.2 * step}[arm] + 0.01 * seed**2


def stand_in(phase, on_step):
    def run(workspace):
        config = workspace.config
        workspace.begin(phase)
        arm = workspace.run_dir.parent.name

        def step_function(step, state, meta):
            on_step(workspace, phase, step)
            metrics = {
                "response_length/mean": 100.0 - step,
                "critic/vf_loss": 0.5 / step,
                "held_out/vf_loss": 1.0 / step,
            }
            if phase == "rl":
                metrics["val-core/running_sum/acc/mean@1"] = accuracy_of(arm, config.seed, step)
                metrics["val-aux/running_sum/response_length/mean"] = 90.0 + config.seed
            return StepResult({"x": state["x"] + 1}, meta, metrics)

        if phase == "rl":
            write_json(workspace.phase_dir("rl") / "positions.json", POSITIONS)
        steps = getattr(config, phase).steps
        everywhere = NamedSharding(workspace.mesh, PartitionSpec())
        abstract = {"x": jax.ShapeDtypeStruct((1,), jnp.float32, sharding=everywhere)}
        loop = workspace.loop(phase, steps)
        _, _, done = loop.run(lambda: {"x": jnp.zeros(1, device=everywhere)}, abstract, step_function)
        workspace.finish(phase, {"steps": done})

    return run


def stand_in_evaluation(workspace):
    (workspace.begin("evaluate") / "metrics.jsonl").write_text('{"step": 0}\n')
    summary = {"val-core/running_sum/acc/mean@1": 0.65 + 0.01 * workspace.config.seed}
    workspace.finish("evaluate", summary)


POSITIONS = {
    "by_position": {"values": [-1.5, -0.5, 9.0], "advantages": [0.7, -0.2, 9.0], "count": [8, 4, 0]},
    "by_distance_to_end": {"reward_weight": [1.0, 0.9, 9.0], "count": [8, 4, 0]},
    "gamma": 1.0,
    "lambda_actor": 0.9,
    "length_adaptive_alpha": None,
}


@pytest.fixture
def phases(monkeypatch):
    """The stand-ins; the dictionary's `on_step(workspace, phase, step)` is called in each step."""
    hooks = {"on_step": lambda workspace, phase, step: None, "steps": []}

    def on_step(workspace, phase, step):
        hooks["steps"].append((workspace.run_dir.parent.name, workspace.config.seed, phase, step))
        hooks["on_step"](workspace, phase, step)

    for phase in ("sft", "value", "rl"):
        monkeypatch.setitem(pipeline.PHASES, phase, stand_in(phase, on_step))
    monkeypatch.setitem(pipeline.PHASES, "evaluate", stand_in_evaluation)
    monkeypatch.setattr("vcppo_jax.rewards.pool.VerifierPool.start", lambda self: None)
    monkeypatch.setattr(pipeline, "check_inputs", lambda config, phases: None)  # they leave no models behind
    # These take most of the time, and add nothing here.
    monkeypatch.setattr(pipeline, "write_report", lambda run_dir: run_dir)
    monkeypatch.setattr("vcppo_jax.phases.study.gc.collect", lambda: 0)
    return hooks


def test_a_study_runs_once_and_shows_its_numbers(tmp_path, phases, capsys):
    plan = read(tmp_path)
    page_file = run_study(plan)
    output = capsys.readouterr().out
    assert "=== parts: arm 1/4 ppo seed 0 (" in output
    assert "=== parts: arm 4/4 vcppo seed 1 (" in output
    assert len(phases["steps"]) == 2 * (2 + 4 + 2 + 2)

    page = Page(page_file)
    assert page.open == []
    assert "4 of 4 arm runs finished (2 arms, 2 seeds); 4 of 4 stage runs finished" in page.text
    assert "The paper: PPO <collapses>." in page.text
    end = "65.5% ± 0.7% 65.0%, 66.0%"  # vcppo, from its evaluation
    assert end in page.text
    assert "10.5% ± 0.7% 10.0%, 11.0%" in page.text  # ppo, from its last step
    assert "20.5% ± 0.7% 20.0%, 21.0%" in page.text  # ppo at its best
    charts = page.charts()
    assert len(charts) == 4
    assert "PPO: 99 at RL step 1, 98 at RL step 2." in charts[0]
    assert "VC-PPO: 50.5% at RL step 1, 70.5% at RL step 2." in charts[0]
    assert (
        "PPO: -1.5 at token position 0, -0.5 at token position 1." in charts[1]
    )  # the uncounted third is left out
    assert "PPO: 1 at tokens before the last one, d 0, 0.9 at" in charts[2]
    assert "(γ λ_actor)^d: 1 at tokens before the last one, d 0, 0.9 at" in charts[2]
    assert "stage value: 1 at step 1, 0.25 at step 4." in charts[3]
    ids = [identity for identity in page.ids if identity]
    assert len(ids) == len(set(ids))

    text = (tmp_path / "out" / "study.md").read_text()
    assert "> The paper: PPO <collapses>." in text
    assert "| VC-PPO | 2 of 2 |" in text
    for file in ("1-curves", "2-positions", "3-reward_decay", "4-value_loss"):
        assert f"](figures/{file}.svg)" in text
        svg = (tmp_path / "out" / "figures" / f"{file}.svg").read_text()
        assert "var(--" not in svg
        assert "#0a0b" not in svg
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    numbers = results["arms"]["vcppo"]["numbers"]
    assert numbers["accuracy_end"]["by_seed"] == {"0": 0.65, "1": 0.66}
    assert numbers["samples"]["mean"] == 2 * 8
    assert numbers["updates"]["mean"] == 2 * 2
    assert numbers["pretraining_samples"]["mean"] == 2 * 8
    assert results["arms"]["ppo"]["numbers"]["pretraining_samples"]["mean"] == 0
    line = results["figures"][0]["panels"][0]["lines"][0]
    assert (line["label"], line["x"], line["by_seed"]) == ("PPO", [1, 2], {"0": [99, 98], "1": [99, 98]})

    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("metrics.jsonl")}
    phases["steps"].clear()
    run_study(plan)
    assert phases["steps"] == []
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert capsys.readouterr().out.count("finished already in") == 8


def test_an_interrupted_study_goes_on_where_it_stopped(tmp_path, phases, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_configure_jax", lambda: None)

    def interrupt(workspace, phase, step):
        if (workspace.run_dir.parent.name, workspace.config.seed, step) == ("vcppo", 0, 1):
            os.kill(os.getpid(), signal.SIGTERM)

    phases["on_step"] = interrupt
    file = write_study_file(tmp_path, without_figures)
    assert cli.main(["study", str(file)]) == 128 + signal.SIGTERM
    assert phases["steps"][-1] == ("vcppo", 0, "rl", 1)
    page = Page(tmp_path / "out" / "study.html")
    assert "VC-PPO, seed 0: not finished: rl at step 1 of 2" in page.text
    assert "VC-PPO, seed 1: has not run yet" in page.text
    assert "PPO 1 of 2" in page.text

    phases["on_step"] = lambda *_: None
    phases["steps"].clear()
    assert cli.main(["study", str(file)]) == 0
    assert phases["steps"][0] == ("vcppo", 0, "rl", 2)
    assert {(arm, seed) for arm, seed, _, _ in phases["steps"][1:]} == {
        (name, 1) for name in ("sft", "value", "ppo", "vcppo")
    }
    rows = read_metrics(tmp_path / "out" / "arms" / "vcppo" / "seed_0" / "rl")
    assert [row["step"] for row in rows] == [1, 2]
    assert accuracy(rows[-1]) == pytest.approx(0.7)


def test_a_signal_between_two_runs_stops_the_study(tmp_path, phases, monkeypatch):
    plan = read(tmp_path, without_figures)

    def evaluated(workspace):
        stand_in_evaluation(workspace)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setitem(pipeline.PHASES, "evaluate", evaluated)
    with pytest.raises(Interrupted):
        run_study(plan)
    assert {seed for _, seed, _, _ in phases["steps"]} == {0}


def test_a_failed_arm_is_recorded_and_the_study_goes_on(tmp_path, phases, capsys):
    def fail(workspace, phase, step):
        if (workspace.run_dir.parent.name, workspace.config.seed, step) == ("ppo", 1, 2):
            raise NonFiniteError("rl step 2: loss is nan")

    phases["on_step"] = fail
    plan = read(tmp_path, lambda study: study.update(figures=study["figures"][:1]))
    page = Page(run_study(plan))
    assert page.text.count("PPO, seed 1: failed: rl step 2: loss is nan") >= 2
    assert "PPO 1 of 2" in page.text
    assert "3 of 4 arm runs finished" in page.text
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["arms"]["ppo"]["seeds"]["1"]["status"] == "failed"
    assert list(results["arms"]["ppo"]["numbers"]["accuracy_end"]["by_seed"]) == ["0"]
    assert list(results["figures"][0]["panels"][0]["lines"][0]["by_seed"]) == ["0", "1"]  # its curve is shown

    plan = read(tmp_path, without_figures)
    phases["steps"].clear()
    run_study(plan)
    assert phases["steps"] == []
    assert "failed before: rl step 2: loss is nan; remove " in capsys.readouterr().out
    phases["on_step"] = lambda *_: None
    (tmp_path / "out" / "arms" / "ppo" / "seed_1" / "status.json").unlink()
    assert "4 of 4 arm runs finished" in Page(run_study(plan)).text


def test_arms_of_a_failed_stage_are_skipped_until_it_has_a_result(tmp_path, phases):
    def fail(workspace, phase, step):
        if (phase, workspace.config.seed) == ("value", 0):
            raise NonFiniteError("value step 1: loss is nan")

    phases["on_step"] = fail
    plan = read(tmp_path, without_figures)
    page = Page(run_study(plan))
    assert "stage value, seed 0: failed: value step 1: loss is nan" in page.text
    assert "VC-PPO, seed 0: skipped: stage value of this seed has no result" in page.text
    assert "3 of 4 arm runs finished" in page.text
    phases["on_step"] = lambda *_: None
    (tmp_path / "out" / "stages" / "value" / "seed_0" / "status.json").unlink()
    assert "4 of 4 arm runs finished" in Page(run_study(plan)).text


def test_only_arms_whose_settings_changed_are_refused(tmp_path, phases):
    run_study(read(tmp_path, without_figures))
    phases["steps"].clear()

    def change(study):
        without_figures(study)
        set_arm("ppo", critic={"learning_rate": 0.5})(study)
        study["seeds"] = [0, 1, 2]

    plan = read(tmp_path, change)
    with pytest.raises(
        ConfigError, match=r"arms/ppo/seed_0/rl began with other settings of critic"
    ) as caught:
        run_study(plan)
    assert len(str(caught.value).splitlines()) == 2  # one of each seed that has begun
    assert {seed for _, seed, _, _ in phases["steps"]} == {2}
    page = Page(tmp_path / "out" / "study.html")
    assert "PPO 1 of 3" in page.text
    assert "VC-PPO 3 of 3" in page.text
    assert "PPO, seed 0: refused: " in page.text


def test_the_page_is_written_again_from_what_is_there(tmp_path, phases, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_configure_jax", lambda: None)
    run_study(read(tmp_path, without_figures))
    file = write_study_file(tmp_path)
    (tmp_path / "out" / "study.html").unlink()
    for positions in (tmp_path / "out").rglob("positions.json"):
        positions.unlink()
    (tmp_path / "out" / "arms" / "vcppo" / "seed_1" / "rl" / "metrics.jsonl").unlink()
    phases["steps"].clear()
    assert cli.main(["study", str(file), "--page"]) == 0
    assert phases["steps"] == []
    page = Page(tmp_path / "out" / "study.html")
    assert "PPO, seed 0: rl/positions.json is not there" in page.text
    assert "mean value: nothing of PPO, VC-PPO" in page.text
    assert page.text.count("Nothing to draw yet.") == 2


def test_a_page_before_anything_has_run_says_so(tmp_path, phases, monkeypatch):
    monkeypatch.setattr(cli, "_configure_jax", lambda: None)
    assert cli.main(["study", str(write_study_file(tmp_path)), "--page"]) == 0
    assert phases["steps"] == []
    page = Page(tmp_path / "out" / "study.html")
    assert "0 of 4 arm runs finished" in page.text
    assert "PPO, seed 0: has not run yet" in page.text
    assert page.charts() == []


# Numbers.


def test_mean_and_sample_standard_deviation_are_numpys():
    values = np.random.default_rng(0).normal(size=5)
    found = Statistic(dict(enumerate(values.tolist())))
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    one = Statistic({3: 0.5})
    assert (one.mean, one.std) == (0.5, None)
    assert (Statistic({}).mean, Statistic({}).std) == (None, None)


def test_a_curve_is_over_the_seeds_that_reach_the_step():
    curve = Curve({0: {1: 1.0, 2: 3.0}, 1: {1: 2.0}})
    assert curve.x == [1, 2]
    assert [curve.over_seeds(f) for f in (np.mean, min, max)] == [[1.5, 3.0], [1.0, 3.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("by_seed", "form", "text", "seeds"),
    [
        ({0: 0.5, 1: 0.6}, "+.2f", "+0.55 ± 0.07", "+0.50, +0.60"),
        ({0: 640.0, 1: 640.0}, ",.0f", "640", ""),
        ({0: 0.5}, ".1%", "50.0%", ""),
        ({}, ".1%", "–", ""),
    ],
)
def test_a_cell_shows_the_spread_only_where_there_is_one(by_seed, form, text, seeds):
    found = cell(Statistic(by_seed), Quantity("q", form, lambda run: None))
    assert (found.text, found.seeds) == (text, seeds)


def test_dynamic_sampling_counts_the_samples_that_were_dropped(tmp_path):
    plan = read(tmp_path, without_figures)
    directory = tmp_path / "out" / "arms" / "ppo" / "seed_0" / "rl"
    directory.mkdir(parents=True)
    lines = [
        {"step": 0},
        {"step": 1, "dynamic_sampling/rounds": 3},
        {"step": 2, "dynamic_sampling/rounds": 1},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(directory / "summary.json", {"finished": True})
    write_page(plan)
    numbers = json.loads((tmp_path / "out" / "results.json").read_text())["arms"]["ppo"]["numbers"]
    assert numbers["samples"]["mean"] == (3 + 1) * 8
