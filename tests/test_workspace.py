"""What a phase that goes on may change, where RL's value model comes from, and which problems there are."""

import json

import jax.numpy as jnp
import pytest
import yaml
from tiny_run import on_one_device, tiny_config

from vcppo_jax.config_load import ConfigError
from vcppo_jax.data.tokenizer import builtin_model_dir
from vcppo_jax.phases.artifacts import save_model_files
from vcppo_jax.phases.inputs import check_inputs
from vcppo_jax.phases.networks import starting_moments, value_model_path
from vcppo_jax.phases.pipeline import run_phases
from vcppo_jax.phases.workspace import COMPARED, Workspace, changed_settings
from vcppo_jax.run.checkpoint import Checkpoints

# phase -> (a change that it must refuse, a change that it must allow)
CHANGES = {
    "sft": (("rollout.max_new_tokens=10", "sft.batch_size=8"), ("rollout.n=4", "rl.steps=9")),
    "reward": (("rollout.max_new_tokens=10", "reward_model.steps=2"), ("rollout.n=4", "sft.steps=2")),
    "value": (
        ("rollout.n=4", "value.steps=9", "critic.beta2=0.9", "reward.scale=zero_one", "algorithm.gamma=0.9"),
        ("algorithm.lambda_actor=0.9", "actor.learning_rate=0.1", "data.validation=x.jsonl"),
    ),
    "rl": (
        ("algorithm.lambda_actor=0.9", "actor.learning_rate=0.1", "seed=1", "phases=[rl]", "reward.clip=1.0"),
        ("sft.steps=9", "data.validation=x.jsonl", "evaluate.top_p=0.5", "train.row_tokens=50"),
    ),
    "evaluate": ((), ("seed=1", "data.validation=x.jsonl", "rollout.n=4")),
    "grade": (("grade.easy_from=0.8", "rollout.n=4"), ("rl.steps=9", "data.validation=x.jsonl")),
}  # fmt: skip


def plain(config):
    return config.model_dump(mode="json")


@pytest.mark.parametrize("phase", COMPARED)
def test_a_phase_refuses_what_it_depends_on_and_nothing_else(tmp_path, phase):
    ours = plain(tiny_config(tmp_path))
    refused, allowed = CHANGES[phase]
    for word in refused:
        changed = changed_settings(phase, plain(tiny_config(tmp_path, word)), ours)
        assert [key.split(" ")[0] for key in changed] == [word.partition("=")[0]], word
    for word in allowed:
        assert changed_settings(phase, plain(tiny_config(tmp_path, word)), ours) == [], word


@pytest.mark.parametrize(
    ("phase", "result"),
    [
        ("rl", "metrics.jsonl"),
        ("rl", "checkpoints/0/meta"),
        ("rl", "summary.json"),
        ("grade", "grades.jsonl"),
    ],
)
def test_a_phase_holds_to_its_settings_once_it_has_done_something(tmp_path, monkeypatch, phase, result):
    on_one_device(monkeypatch)
    first = Workspace(tiny_config(tmp_path, "rollout.n=4"))
    first.run_dir.mkdir()
    directory = first.begin(phase)
    (directory / "metrics.jsonl").write_text('{"step": 0}\n')  # as a loop that ends in its first step
    (directory / "checkpoints").mkdir()
    corrected = Workspace(tiny_config(tmp_path))
    assert corrected.begin(phase) == directory
    for file in (directory / "config.yaml", corrected.run_dir / "config.yaml"):
        assert yaml.safe_load(file.read_text())["rollout"]["n"] == 2
    (directory / result).parent.mkdir(exist_ok=True, parents=True)
    (directory / result).write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"began with other settings of rollout\.n; restore them"):
        first.begin(phase)
    corrected.begin(phase)


def named(tmp_path, *words, phases=None):
    """The keys whose files are missing."""
    config = tiny_config(tmp_path, *words)
    try:
        check_inputs(config, config.phases if phases is None else phases)
    except ConfigError as error:
        return [line.partition(": ")[0] for line in str(error).splitlines()]
    return []


def test_files_that_are_missing_are_named_before_anything_is_written(tmp_path):
    words = ("phases=[sft,rl]", "data.train=none.jsonl", "data.validation=no.jsonl", "sft.data=x.jsonl")
    config = tiny_config(tmp_path, *words, "model.path=nowhere")
    with pytest.raises(ConfigError) as caught:
        run_phases(config, config.phases)
    assert str(caught.value).splitlines() == [
        "model.path: nowhere: does not exist; expected a directory with a config.json (a Hugging Face "
        "directory) or a trained policy (a run, a phase of it, or PHASE/checkpoints/STEP)",
        "data.validation: no.jsonl: expected a JSONL or parquet file; there is none",
        "sft.data: x.jsonl: expected a JSONL or parquet file; there is none",
        "data.train: none.jsonl: expected a JSONL or parquet file; there is none",
    ]
    assert not (tmp_path / "run").exists()


def test_each_phase_looks_for_the_files_that_it_reads(tmp_path):
    assert named(tmp_path) == []
    assert named(tmp_path, "model.path=builtin:big") == ["model.path"]
    train = ("data.train=x.jsonl", "sft.data=y.jsonl", "reward_model.data=z.jsonl", "rl.evaluate_every=0")
    wanted = {"sft": "sft.data", "reward": "reward_model.data", "value": "data.train", "rl": "data.train"}
    for phase, key in wanted.items():
        assert named(tmp_path, *train, phases=(phase,)) == [key]
    assert named(tmp_path, *train, phases=("grade",)) == ["data.train"]
    assert named(tmp_path, *train, "algorithm.sft_coef=1", phases=("rl",)) == ["data.train", "sft.data"]
    (tmp_path / "x.jsonl").touch()
    held_out = f"data.validation={tmp_path / 'x.jsonl'},task:running_sum,none.jsonl"
    for phase in ("sft", "value", "rl", "evaluate"):
        assert named(tmp_path, held_out, phases=(phase,)) == ["data.validation"]
    assert named(tmp_path, held_out, "rl.evaluate_every=0", phases=("rl", "grade", "reward")) == []


def test_models_are_looked_for_unless_an_earlier_phase_writes_them(tmp_path):
    save_model_files(tmp_path / "other", "critic", builtin_model_dir("tiny"), {})
    critic = ("value_model.init=checkpoint", f"value_model.path={tmp_path / 'none'}")
    for phase in ("value", "rl"):
        assert named(tmp_path, *critic, f"phases=[{phase}]") == ["value_model.path"]
        assert named(tmp_path, critic[0], f"value_model.path={tmp_path / 'other'}", f"phases=[{phase}]") == []
    assert named(tmp_path, *critic, phases=("sft", "rl", "evaluate")) == []  # rl starts from the value phase
    run_dir = tmp_path / "run"
    scores = ("phases=[reward,rl]", "reward.source=model", f"reward.model={run_dir / 'reward'}")
    assert named(tmp_path, *scores) == []
    assert named(tmp_path, *scores, phases=("rl",)) == ["reward.model"]
    own = ("phases=[reward,value]", "value_model.init=reward_model", f"value_model.path={run_dir}")
    assert named(tmp_path, *own) == []


def test_demonstrations_matter_to_rl_where_they_are_mixed_in(tmp_path):
    with_mix = ("algorithm.sft_coef=0.1",)
    ours = plain(tiny_config(tmp_path, *with_mix))
    theirs = plain(tiny_config(tmp_path, *with_mix, "sft.data=x.jsonl"))
    assert changed_settings("rl", ours, theirs) == ["sft.data"]


def test_rl_needs_finished_value_pretraining_with_the_same_rewards(tmp_path):
    workspace = Workspace(tiny_config(tmp_path))
    directory = workspace.run_dir / "value"
    directory.mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no finished value-pretraining"):
        value_model_path(workspace, "rl")
    workspace.begin("value")
    early = Workspace(tiny_config(tmp_path, "value_model.step=1"))
    assert value_model_path(early, "rl") == directory / "checkpoints" / "1"
    (directory / "summary.json").write_text(json.dumps({"finished": True}))
    assert value_model_path(workspace, "rl") == directory
    other = Workspace(tiny_config(tmp_path, "reward.scale=zero_one"))
    with pytest.raises(ConfigError, match=r"learned from other rewards \(reward\.scale\)"):
        value_model_path(other, "rl")
    assert starting_moments(workspace, "rl") is None  # no running normalisation


def test_running_moments_are_those_of_the_checkpoint(tmp_path):
    phase = tmp_path / "other" / "value"
    save_model_files(phase, "critic", builtin_model_dir("tiny"), {"head_bias": False})
    with Checkpoints(phase / "checkpoints", keep_last=2, keep_best_metric=None, keep_best_mode="min") as kept:
        for step in (1, 2):
            kept.save(step, {"w": jnp.zeros(2)}, {"reward_moments": [float(step), 0.5, 0.25]}, None)
    for path, count in ((phase, 2.0), (phase / "checkpoints" / "1", 1.0)):
        words = ("phases=[rl]", "value_model.init=checkpoint", f"value_model.path={path}")
        without = Workspace(tiny_config(tmp_path, *words))
        assert starting_moments(without, "rl") is None
        workspace = Workspace(tiny_config(tmp_path, *words, "reward.normalize=running"))
        assert starting_moments(workspace, "rl") == [count, 0.5, 0.25]


def test_held_out_problems_of_a_task_for_prompts_of_a_file(tmp_path):
    file = tmp_path / "hard.jsonl"
    file.write_text('{"prompt": "1 2 3", "answer": "6"}\n')
    words = (f"data.train={file}", "phases=[rl]", "data.validation=task:running_sum")
    workspace = Workspace(tiny_config(tmp_path, *words))
    assert [record.answer for record in workspace.records("train")] == ["6"]
    held_out = workspace.records("validation")
    assert len(held_out) == 8
    assert held_out == Workspace(tiny_config(tmp_path)).records("validation")


def test_reasoning_gyms_tasks_have_two_splits_of_different_questions(tmp_path):
    pytest.importorskip("reasoning_gym", reason="not installed: python3 -m pip install -e '.[tasks]'")
    words = ("data.train=task:reasoning_gym/gcd", "phases=[rl]", "data.max_prompt_tokens=500")
    workspace = Workspace(tiny_config(tmp_path, *words))
    train, held_out = (workspace.records(split) for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (64, 8)
    assert not {r.prompt_text for r in train} & {r.prompt_text for r in held_out}
