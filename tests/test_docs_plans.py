"""The plans under docs/plans/ are those of the configurations as they are now, and fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vcppo_jax.config_load import load_config

ROOT = Path(__file__).parents[1]
PLANS = sorted((ROOT / "docs" / "plans").glob("*.json"))


def test_every_configuration_that_says_so_has_its_plan():
    named = {path.stem for path in (ROOT / "configs").glob("*.yaml") if "docs/plans/" in path.read_text()}
    assert named == {path.stem for path in PLANS} != set()


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_is_of_the_configuration_as_it_is_and_leaves_a_tenth_free(path):
    plan = json.loads(path.read_text())
    config = load_config(str(ROOT / "configs" / f"{path.stem}.yaml"), [], phase="rl")
    sizes = {axis: size for axis, size in config.mesh.sizes.items() if not axis.startswith("dcn")}
    assert {axis: plan["mesh"][axis] for axis in sizes} == sizes
    assert plan["remat"] == config.model.remat
    assert plan["micro_batch_tokens"] == config.train.micro_batch_tokens
    assert plan["tokens"] == {
        "prompt": config.data.max_prompt_tokens,
        "response": config.rollout.max_new_tokens,
    }
    programs = {program["name"]: program for program in plan["programs"]}
    assert f"in {config.rollout.batch_size} slots" in programs["decode"]["shape"]
    page = path.with_suffix(".md").read_text()
    assert f"{plan['command']}\n" in page
    memory = plan["topology"]["memory_gib"] * 2**30
    assert plan["fits"]
    assert all(0 < p["needed_bytes"] <= 0.9 * memory for p in programs.values())
