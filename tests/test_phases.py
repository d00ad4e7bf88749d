"""Each phase trains, writes what the design names, and hands its result to the next; export; load."""

import json
import time

import numpy as np
import pytest
from tiny_run import judge_by_row, on_one_device, tiny_config, whole_run

import vcppo_jax as vc
from vcppo_jax.config_load import ConfigError
from vcppo_jax.phases.artifacts import export
from vcppo_jax.phases.loop import write_whole
from vcppo_jax.phases.pipeline import run_phases
from vcppo_jax.phases.value import settled
from vcppo_jax.rewards.score import Verdict
from vcppo_jax.run.metrics import read_metrics
from vcppo_jax.train.learner import Scorer

RL_NAMES = {
    "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy", "actor/grad_norm",
    "actor/ratio_first_update", "critic/vf_loss", "critic/vf_explained_var", "critic/score/mean",
    "critic/rewards/mean", "critic/advantages/mean", "critic/returns/max", "critic/values/min",
    "critic/advantages/decile_0", "critic/values/decile_9", "response_length/mean",
    "response_length/clip_ratio", "timing_s/step", "perf/throughput", "perf/total_num_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return whole_run(tmp_path_factory.getbasetemp())


def test_the_pipeline_runs_all_phases_and_names_its_metrics_as_the_design_does(run):
    assert "Reinforcement learning" in (run / "run" / "report.html").read_text()
    for phase in ("sft", "value", "rl", "evaluate"):
        assert json.loads((run / "run" / phase / "summary.json").read_text())["finished"]
    for phase in ("sft", "value", "rl"):
        steps = {p.name for p in (run / "run" / phase / "checkpoints").iterdir()}
        assert {"3", "4"} <= steps
    sft = read_metrics(run / "run" / "sft")
    assert [row["step"] for row in sft] == [1, 2, 3, 4]
    assert {"sft/loss", "sft/grad_norm", "timing_s/step"} <= set(sft[-1])
    rl = read_metrics(run / "run" / "rl")
    assert [row["step"] for row in rl] == [0, 1, 2, 3, 4]
    assert set(rl[-1]) >= RL_NAMES | {"val-core/running_sum/acc/mean@2", "val-aux/running_sum/acc/best@2"}
    assert rl[1]["actor/ratio_first_update"] == pytest.approx(1.0, abs=1e-5)
    value = read_metrics(run / "run" / "value")
    assert [row["step"] for row in value] == [0, 1, 2, 3, 4]
    assert {"held_out/vf_loss", "held_out/vf_explained_var", "critic/vf_loss"} <= set(value[-1])


def test_value_pretraining_leaves_the_policy_alone_and_moves_the_value_model(run):
    steps = [vc.load_value_model(run / "run" / "value" / "checkpoints" / s) for s in ("3", "4")]
    assert not np.array_equal(*(np.asarray(model.params["score"]["kernel"]) for model in steps))
    assert not (run / "run" / "value" / "model").exists()


@pytest.mark.parametrize(
    ("load", "phase"),
    [(vc.load_policy, "sft"), (vc.load_value_model, "value")],
    ids=["policy", "value_model"],
)
def test_a_run_is_its_last_phase_and_a_phase_its_last_step(run, load, phase):
    base = run / "run"
    checkpoints = base / "rl" / "checkpoints"
    paths = [base, base / "rl", checkpoints / "4", checkpoints / "3", base / phase]
    whole, rl, last, third, before = (np.asarray(load(path).params["embed"]) for path in paths)
    np.testing.assert_array_equal(whole, last)
    np.testing.assert_array_equal(rl, last)
    assert not np.array_equal(third, last)
    assert not np.array_equal(before, third)
    with pytest.raises(ValueError, match=r"no such checkpoint; there are .*3, 4"):
        load(checkpoints / "7")


def test_finished_phases_are_left_alone_and_other_settings_are_refused(run, capsys):
    before = (run / "run" / "rl" / "metrics.jsonl").read_text()
    config = tiny_config(run)
    run_phases(config, ("sft", "value", "rl"))
    assert "rl: finished already" in capsys.readouterr().out
    assert (run / "run" / "rl" / "metrics.jsonl").read_text() == before
    changed = tiny_config(run, "actor.learning_rate=0.5")
    with pytest.raises(ConfigError, match=r"actor\.learning_rate"):
        run_phases(changed, ("rl",))


def unaccounted(row):
    """Seconds of a step that no stage of its timeline has."""
    stages = [v for k, v in row.items() if k.startswith("timing_s/") and k != "timing_s/step"]
    return row["timing_s/step"] - sum(stages)


@pytest.mark.parametrize("phase", ["sft", "value", "rl"])
def test_the_stages_of_a_step_sum_to_its_time(run, phase):
    rows = [row for row in read_metrics(run / "run" / phase) if row["step"] > 0]
    assert all(unaccounted(row) >= 0 for row in rows)
    assert sum(map(unaccounted, rows)) < 0.1 * sum(row["timing_s/step"] for row in rows) + 0.1


BASELINES = {
    "grpo-kl-loss": ("algorithm.advantage=grpo", "algorithm.kl_coef=0.1"),
    "grpo": ("algorithm.advantage=grpo",),
    "ppo-kl-reward": ("algorithm.lambda_critic=0.95", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"),
}


ORDER = (
    "generate", "old_log_prob", "ref", "reward", "values", "verify", "adv",
    "update_critic", "update_actor", "step",
)  # fmt: skip
"""Of a step's stages; the metrics list them as they ran."""


VERIFIER_SECONDS, SCORING_SECONDS = 1.0, 0.4
"""How long the stubs below take: the verifier once a step, each pass for log-probs or values."""


def slow(responses, golds, **_):
    """A verifier that takes its time."""
    time.sleep(VERIFIER_SECONDS)
    return [Verdict(-1.0, "wrong")] * len(responses)


@pytest.mark.parametrize("name", BASELINES)
def test_the_baselines_run_on_the_same_code(run, tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr("vcppo_jax.phases.collect.verify", slow)
    # Verdicts that differ between the samples of a prompt, which those of an untrained model never do.
    judge_by_row(monkeypatch, 2)
    score = Scorer.__call__
    monkeypatch.setattr(Scorer, "__call__", lambda *given: (time.sleep(SCORING_SECONDS), score(*given))[1])
    config = tiny_config(
        tmp_path,
        "phases=[rl]",
        f"model.path={run / 'run' / 'sft'}",
        "model.init=pretrained",
        "rl.steps=2",
        "rl.evaluate_every=0",
        *BASELINES[name],
    )
    run_phases(config, ("rl",))
    rows = read_metrics(tmp_path / "run" / "rl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0.1 and row["critic/advantages/max"] > 0.5 for row in rows)
    # The scores 1 and -1 of a pair, over their unbiased standard deviation.
    group_relative = [row["critic/advantages/max"] == pytest.approx(0.5**0.5, abs=1e-4) for row in rows]
    assert group_relative == [name.startswith("grpo")] * 2
    has_critic = not name.startswith("grpo")
    assert ("value model from the policy's weights; head new" in capsys.readouterr().out) == has_critic
    assert ("critic/vf_loss" in rows[1]) == has_critic
    assert (tmp_path / "run" / "rl" / "value_model").exists() == has_critic
    assert [row.get("actor/kl_loss", 0.0) > 0 for row in rows] == [name == "grpo-kl-loss"] * 2
    stages = [key.removeprefix("timing_s/") for key in rows[0] if key.startswith("timing_s/")]
    assert stages == [stage for stage in ORDER if stage in stages], "in the order in which they ran"
    assert ("ref" in stages, "update_critic" in stages) == (name != "grpo", has_critic)
    # The verifier works while log-probs and values are computed; only what it then still needs is waited for.
    passes = sum(stage in ("old_log_prob", "ref", "values") for stage in stages)
    seconds = rows[1]
    assert seconds["timing_s/old_log_prob"] > SCORING_SECONDS
    left = max(0.0, VERIFIER_SECONDS - passes * SCORING_SECONDS)
    assert seconds["timing_s/verify"] < left + 0.3
    # At the first rollout the policy is the reference; later a penalty is taken off the score.
    penalty = [row["critic/score/mean"] - row["critic/rewards/mean"] for row in rows]
    assert penalty[0] == pytest.approx(0, abs=1e-6)
    assert (penalty[1] > 1e-5) == (name == "ppo-kl-reward")


def test_a_rollout_ends_at_stop_texts_and_at_its_token_budget(run, tmp_path, monkeypatch):
    """What the budget leaves empty is no obstacle to the updates."""
    on_one_device(monkeypatch)
    config = tiny_config(
        tmp_path,
        "phases=[rl]",
        f"model.path={run / 'run' / 'sft'}",
        "model.init=pretrained",
        "rl.steps=2",
        "rl.evaluate_every=0",
        "rollout.batch_size=8",
        "rollout.token_budget=20",
        f"rollout.stop={list('0123456789')}",
    )
    run_phases(config, ("rl",))
    for row in read_metrics(tmp_path / "run" / "rl"):
        assert row["response_length/min"] == 0
        assert 20 <= row["response_length/mean"] * 16 < 20 + 8 * 12
        assert 0 < row["rollout/slot_utilisation"] <= 1
        assert all(np.isfinite(value) for value in row.values())
        assert row["actor/grad_norm"] > 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "rl" / "samples.jsonl").open()]
    texts = [sample["response"] for sample in samples]
    assert any(any(c.isdigit() for c in text) for text in texts)
    assert not any(c.isdigit() for text in texts for c in text[:-2]), "no token has more than two characters"


@pytest.mark.parametrize("int8", [False, True])
def test_int8_weights_sample_from_a_rounded_policy(run, tmp_path, monkeypatch, int8):
    on_one_device(monkeypatch)
    config = tiny_config(
        tmp_path,
        "phases=[rl]",
        f"model.path={run / 'run' / 'sft'}",
        "model.init=pretrained",
        "rl.steps=1",
        "rl.evaluate_every=0",
        f"rollout.int8_weights={int8}",
        "algorithm.importance_correction=token",
    )
    run_phases(config, ("rl",))
    (row,) = read_metrics(tmp_path / "run" / "rl")
    assert (row["rollout/logprob_diff/mean"] > 1e-4) == int8
    assert row["actor/ratio_first_update"] == pytest.approx(1, abs=1e-4)
    assert row["actor/grad_norm"] > 0


def test_any_checkpoint_of_value_pretraining_starts_rl(run, tmp_path, capsys):
    checkpoint = run / "run" / "value" / "checkpoints" / "1"
    config = tiny_config(
        tmp_path,
        "phases=[rl]",
        f"model.path={run / 'run' / 'sft'}",
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

    out = export(run / "run", tmp_path / "hf")
    policy = vc.load_policy(run / "run")
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    ours = vc.generate(policy, prompts, sampling=vc.Sampling(max_new_tokens=12, temperature=0), key=_key())
    model = AutoModelForCausalLM.from_pretrained(out)
    theirs = model.generate(
        torch.tensor(prompts), attention_mask=torch.ones(2, 5), max_new_tokens=12, do_sample=False
    )[:, 5:]
    for row, length, other in zip(ours.tokens, ours.lengths, theirs.numpy()):
        ends = np.flatnonzero(np.isin(other, policy.config.eos_token_ids))
        np.testing.assert_array_equal(row[:length], other[: ends[0] + 1] if len(ends) else other)


def _key():
    import jax

    return jax.random.key(0)


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    write_whole(file, "old")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("vcppo_jax.phases.loop.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "new")
    assert file.read_text() == "old"


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
