"""Each preset of configs/algorithms trains for two steps without a warning, and does what its name says."""

import logging
import warnings
from pathlib import Path

import pytest
import yaml
from tiny_run import judge_by_row, on_one_device, tiny_config

from vcppo_jax.phases.pipeline import run_phases
from vcppo_jax.run.metrics import read_metrics

PRESETS = sorted((Path(__file__).parent.parent / "configs" / "algorithms").glob("*.yaml"))
NAMES = {
    "cispo", "dapo", "dr_grpo", "grpo", "gspo", "lite_ppo", "ppo", "reinforce_pp", "reinforce_pp_baseline",
    "rloo", "vapo", "vcppo",
}  # fmt: skip
SAMPLES = 8


def test_every_algorithm_has_its_preset():
    assert {path.stem for path in PRESETS} == NAMES


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_trains_without_a_warning(tmp_path, monkeypatch, caplog, path):
    on_one_device(monkeypatch)
    judge_by_row(monkeypatch, 3)  # verdicts differ within every group; an untrained model's never do
    preset = yaml.safe_load(path.read_text())
    samples = preset.get("rollout", {}).get("n", 2)
    assert samples <= 2 * SAMPLES
    config = tiny_config(
        tmp_path,
        f"include={path}",
        "phases=[rl]",
        "rl.steps=2",
        "rl.evaluate_every=0",
        f"rollout.n={min(samples, SAMPLES)}",
        f"rl.prompts_per_step={SAMPLES // min(samples, SAMPLES)}",
    )
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "vcppo_jax"):
        warnings.simplefilter("error")
        run_phases(config, ("rl",))
    assert not caplog.records
    rows = read_metrics(tmp_path / "run" / "rl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/grad_norm"] > 1e-4
        assert row["actor/ratio_first_update"] == pytest.approx(1, abs=1e-4)
        assert ("critic/vf_loss" in row) == (config.algorithm.advantage == "gae")
        assert ("critic/kl" in row) == (config.algorithm.kl_coef > 0)
        assert ("actor/kl_loss" in row) == (config.algorithm.kl_coef > 0 and config.algorithm.kl_in == "loss")
        assert ("actor/positive_nll" in row) == (path.stem == "vapo")
        assert ("dynamic_sampling/rounds" in row) == (path.stem == "dapo")
        assert ("reward/overlong_penalty/mean" in row) == (path.stem == "dapo")
