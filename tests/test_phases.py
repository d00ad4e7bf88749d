"""Each phase trains, writes what the design names, and hands its result to the next; export; load."""

import json

import numpy as np
import pytest
from tiny_run import tiny_config

import vcppo_jax as vc
from vcppo_jax.config_load import ConfigError
from vcppo_jax.phases.artifacts import export
from vcppo_jax.phases.pipeline import run_phases
from vcppo_jax.phases.value import settled
from vcppo_jax.run.metrics import read_metrics

RL_NAMES = {
    "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy", "actor/grad_norm",
    "actor/ratio_first_update", "critic/vf_loss", "critic/vf_explained_var", "critic/score/mean",
    "critic/rewards/mean", "critic/advantages/mean", "critic/returns/max", "critic/values/min",
    "critic/advantages/decile_0", "critic/values/decile_9", "response_length/mean",
    "response_length/clip_ratio", "timing_s/step", "perf/throughput", "perf/total_num_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("phases")
    config = tiny_config(directory)
    report = run_phases(config, config.phases)
    return directory, report


def test_the_pipeline_runs_all_phases_and_names_its_metrics_as_the_design_does(run):
    directory, report = run
    assert "Reinforcement learning" in report.read_text()
    for phase in ("sft", "value", "rl", "evaluate"):
        assert json.loads((directory / "run" / phase / "summary.json").read_text())["finished"]
    rl = read_metrics(directory / "run" / "rl")
    assert [row["step"] for row in rl] == [0, 1, 2]
    assert set(rl[-1]) >= RL_NAMES | {"val-core/running_sum/acc/mean@2", "val-aux/running_sum/acc/best@2"}
    assert rl[1]["actor/ratio_first_update"] == pytest.approx(1.0, abs=1e-5)
    value = read_metrics(directory / "run" / "value")
    assert [row["step"] for row in value] == [0, 1, 2]
    assert {"held_out/vf_loss", "held_out/vf_explained_var", "critic/vf_loss"} <= set(value[-1])


def test_value_pretraining_leaves_the_policy_alone_and_moves_the_value_model(run):
    directory, _ = run
    steps = [vc.load_value_model(directory / "run" / "value" / "checkpoints" / s) for s in ("1", "2")]
    assert not np.array_equal(*(np.asarray(model.params["score"]["kernel"]) for model in steps))
    policy = vc.load_policy(directory / "run" / "sft")
    first = vc.load_policy(directory / "run" / "rl" / "checkpoints" / "1")
    assert not np.array_equal(np.asarray(policy.params["embed"]), np.asarray(first.params["embed"]))


def test_finished_phases_are_left_alone_and_other_settings_are_refused(run, capsys):
    directory, _ = run
    before = (directory / "run" / "rl" / "metrics.jsonl").read_text()
    config = tiny_config(directory)
    run_phases(config, ("sft", "value", "rl"))
    assert "rl: finished already" in capsys.readouterr().out
    assert (directory / "run" / "rl" / "metrics.jsonl").read_text() == before
    changed = tiny_config(directory, "actor.learning_rate=0.5")
    with pytest.raises(ConfigError, match=r"actor\.learning_rate"):
        run_phases(changed, ("rl",))


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.advantage=grpo", "algorithm.kl_coef=0.1"),
        ("algorithm.lambda_critic=0.95", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"),
    ],
    ids=["grpo-kl-loss", "ppo-kl-reward"],
)
def test_the_baselines_run_on_the_same_code(run, tmp_path, overrides):
    base, _ = run
    config = tiny_config(
        tmp_path,
        "phases=[rl]",
        f"model.path={base / 'run' / 'sft'}",
        "model.init=pretrained",
        "rl.steps=1",
        "rl.evaluate_every=0",
        *overrides,
    )
    run_phases(config, ("rl",))
    row = read_metrics(tmp_path / "run" / "rl")[-1]
    assert row["step"] == 1
    assert ("critic/vf_loss" in row) == ("algorithm.advantage=grpo" not in overrides)
    assert ("actor/kl_loss" in row) == ("algorithm.advantage=grpo" in overrides)


def test_any_checkpoint_of_value_pretraining_starts_rl(run, tmp_path, capsys):
    base, _ = run
    checkpoint = base / "run" / "value" / "checkpoints" / "1"
    config = tiny_config(
        tmp_path,
        "phases=[rl]",
        f"model.path={base / 'run' / 'sft'}",
        "model.init=pretrained",
        "rl.steps=1",
        "rl.evaluate_every=0",
        "value_model.init=checkpoint",
        f"value_model.path={checkpoint}",
    )
    run_phases(config, ("rl",))
    assert f"value model from {checkpoint}; head loaded" in capsys.readouterr().out


def test_the_export_generates_in_transformers_what_this_project_generates(run, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    directory, _ = run
    out = export(directory / "run", tmp_path / "hf")
    policy = vc.load_policy(directory / "run")
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    ours = vc.generate(policy, prompts, sampling=vc.Sampling(max_new_tokens=12, temperature=0), key=_key())
    model = AutoModelForCausalLM.from_pretrained(out)
    theirs = model.generate(
        torch.tensor(prompts), attention_mask=torch.ones(2, 5), max_new_tokens=12, do_sample=False
    )[:, 5:]
    for row, length, other in zip(ours.tokens, ours.lengths, theirs.numpy()):
        np.testing.assert_array_equal(row[:length], other[:length])


def _key():
    import jax

    return jax.random.key(0)


def test_settled_needs_both_loss_and_explained_variance_to_stand_still():
    options = {"window": 3, "loss_tolerance": 0.01, "variance_tolerance": 0.01}
    flat = [[0.5, 0.1]] * 5
    assert settled(flat, **options)
    assert not settled(flat[:3], **options)
    assert not settled([*flat, [0.4, 0.1]], **options)
    assert not settled([*flat, [0.5, 0.2]], **options)
    assert settled([*flat, [0.499, 0.105]], **options)


def test_every_public_name_resolves():
    assert [name for name in vc.__all__ if getattr(vc, name) is None] == []
