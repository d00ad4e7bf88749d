"""What a phase that goes on may change, where RL's value model comes from, and which problems there are."""

import json

import jax.numpy as jnp
import pytest
from tiny_run import tiny_config

from vcppo_jax.config_load import ConfigError
from vcppo_jax.data.tokenizer import builtin_model_dir
from vcppo_jax.phases.artifacts import save_model_files
from vcppo_jax.phases.networks import starting_moments, value_model_path
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
