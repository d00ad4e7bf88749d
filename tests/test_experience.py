"""From scores to advantages and returns, and the metrics of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vcppo_jax.train.experience import (
    AdvantageSettings,
    build_experience,
    experience_metrics,
    position_profile,
)
from vcppo_jax.types import Experience

VCPPO = AdvantageSettings(
    advantage="gae",
    group_size=1,
    gamma=1.0,
    lambda_actor=0.95,
    score_mean="group",
    score_std="group",
    length_adaptive_alpha=None,
    lambda_critic=1.0,
    whiten=False,
    kl_in_reward=False,
    kl_kind="k1",
)
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32)
SCORES = np.array([1.0, -1.0], np.float32)
VALUES = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, -0.5, 7.0, 7.0]], np.float32)
OLD = np.array([[-1.0, -2.0, -0.5, -0.1], [-0.3, -0.7, 9.0, 9.0]], np.float32)
REF = OLD - np.array([[0.2, -0.1, 0.4, 0.3], [0.5, 0.0, 3.0, 3.0]], np.float32)


def build(scores=SCORES, mask=MASK, values=VALUES, loss_mask=None, kl_coef=0.0, **changes):
    settings = dataclasses.replace(VCPPO, **changes)
    loss_mask = mask if loss_mask is None else loss_mask
    return build_experience(scores, mask, loss_mask, OLD, REF, values, kl_coef, settings=settings)


def close(found, expected, **tolerance):
    np.testing.assert_allclose(np.asarray(found), expected, **({"atol": 1e-6} | tolerance))


def test_score_sits_on_the_last_token_and_the_lambdas_differ():
    experience, raw = build()
    close(experience.rewards, [[0, 0, 0, 1], [0, -1, 0, 0]])
    # The actor's lambda discounts the residuals; the critic's targets are the score at every token.
    close(experience.advantages, [[0.799675, 0.7365, 0.67, 0.6], [-1.0 + 0.95 * -0.5, -0.5, 0, 0]])
    close(experience.returns, [[1, 1, 1, 1], [-1, -1, 0, 0]])
    close(raw, experience.advantages)
    assert experience.mask.dtype == np.float32


def test_critic_targets_follow_their_own_lambda():
    experience, _ = build(lambda_critic=0.95)
    advantages = np.array([[0.799675, 0.7365, 0.67, 0.6], [-1.475, -0.5, 0, 0]])
    close(experience.returns, (advantages + VALUES) * MASK)


def test_kl_is_subtracted_from_the_rewards():
    experience, _ = build(kl_coef=0.1, kl_in_reward=True)
    expected = [[-0.02, 0.01, -0.04, 1 - 0.03], [-0.05, -1.0, 0, 0]]
    close(experience.rewards, expected)
    # With lambda 1, the targets are the penalised reward-to-go.
    close(experience.returns[0], [0.92, 0.94, 0.93, 0.97])


def test_whitening_covers_the_batch_and_keeps_the_raw_ones():
    experience, raw = build(whiten=True)
    valid = np.asarray(experience.advantages)[MASK > 0]
    assert abs(valid.mean()) < 1e-6
    assert valid.std(ddof=1) == pytest.approx(1.0, abs=1e-5)
    assert not np.asarray(experience.advantages)[MASK == 0].any()
    close(raw, build()[0].advantages)


def test_grpo_compares_samples_of_a_prompt():
    scores = np.array([1, -1, 1, 1], np.float32)
    mask = np.array([[1, 1], [1, 0], [1, 1], [1, 1]], np.float32)
    zeros = np.zeros((4, 2), np.float32)
    settings = dataclasses.replace(VCPPO, advantage="grpo", group_size=2)
    experience, raw = build_experience(scores, mask, mask, zeros, zeros, zeros, 0.0, settings=settings)
    # (1, -1): mean 0, std sqrt(2); (1, 1): nothing to compare. No whitening over the batch.
    half = 2**-0.5
    close(experience.advantages, [[half, half], [-half, 0], [0, 0], [0, 0]], atol=1e-5)
    close(raw, experience.advantages)
    close(experience.rewards, [[0, 1], [-1, 0], [0, 1], [0, 1]])


def estimate(name, scores, mask, **changes):
    zeros = np.zeros(np.shape(mask), np.float32)
    settings = dataclasses.replace(VCPPO, advantage=name, **changes)
    scores, mask = np.float32(scores), np.float32(mask)
    experience, _ = build_experience(scores, mask, mask, zeros, zeros, zeros, 0.0, settings=settings)
    return experience.advantages


def test_the_other_estimators():
    ones, scores = np.ones((4, 1)), [1, -1, -1, -1]
    close(estimate("grpo", scores, ones, group_size=4), [[1.5], [-0.5], [-0.5], [-0.5]], atol=1e-5)
    close(estimate("grpo", scores, ones, group_size=4, score_std="none"), [[1.5], [-0.5], [-0.5], [-0.5]])
    close(estimate("rloo", scores, ones, group_size=4), [[2], [-2 / 3], [-2 / 3], [-2 / 3]])
    close(estimate("grpo", scores, ones, group_size=2, score_std="batch"), [[1], [-1], [0], [0]], atol=1e-5)
    mask = [[1, 1, 1], [1, 1, 0]]
    whitened = [[0.730297] * 3, [-1.095445] * 2 + [0]]
    close(estimate("reinforce_pp", [1, -1], mask, whiten=True), whitened)
    close(estimate("reinforce_pp", [1, -1], mask, gamma=0.5), [[0.25, 0.5, 1], [-0.5, -1, 0]])
    close(estimate("reinforce_pp_baseline", [1, 0], mask, group_size=2), [[0.5] * 3, [-0.5, -0.5, 0]])


def test_without_a_value_model_a_kl_in_the_reward_counts_for_the_whole_response():
    experience, _ = build(advantage="rloo", group_size=2, kl_coef=0.1, kl_in_reward=True)
    # The rewards summed over each response, 0.92 and -1.05, are compared.
    close(experience.advantages, [[1.97] * 4, [-1.97, -1.97, 0, 0]])


def test_lambda_adapts_to_the_length():
    # alpha 0.5: lambda 0.5 for four tokens, 0 for two.
    experience, _ = build(length_adaptive_alpha=0.5)
    alone = [build(lambda_actor=lam)[0].advantages[row] for row, lam in enumerate((0.5, 0.0))]
    close(experience.advantages, np.stack(alone))


def test_filtered_tokens_are_outside_of_the_whitening():
    loss_mask = MASK * np.array([[1], [0]], np.float32)
    experience, raw = build(loss_mask=loss_mask, whiten=True)
    first = np.asarray(raw)[0]
    close(experience.advantages[0], (first - first.mean()) / first.std(ddof=1), atol=1e-4)
    assert not np.asarray(experience.advantages)[1].any()
    close(raw, build()[0].advantages)


def test_the_position_profile_measures_the_decay_of_the_last_reward():
    experience, raw = build(gamma=0.9)
    settings = dataclasses.replace(VCPPO, gamma=0.9)
    profile = position_profile(experience, raw, settings=settings)
    close(profile["reward_weight"], (0.9 * 0.95) ** np.arange(4), atol=1e-5)
    close(profile["distance_count"], [2, 2, 1, 1])
    close(profile["count"], [2, 2, 1, 1])
    close(profile["values"], [0.3, -0.15, 0.3, 0.4])
    close(profile["advantages"][2:], np.asarray(raw)[0, 2:])


def experience_of(mask, **fields) -> Experience:
    zeros = np.zeros(mask.shape, np.float32)
    names = [f.name for f in dataclasses.fields(Experience)]
    return Experience(**{name: fields.get(name, zeros) for name in names} | {"mask": mask})


def test_metrics_read_valid_tokens_only():
    experience, raw = build()
    metrics = {name: float(x) for name, x in experience_metrics(experience, raw).items()}
    valid = MASK > 0
    for name in ("rewards", "advantages", "returns", "values"):
        x = np.asarray(getattr(experience, name))[valid]
        for statistic in ("mean", "max", "min"):
            expected = getattr(x, statistic)()
            assert metrics[f"critic/{name}/{statistic}"] == pytest.approx(expected, abs=1e-6), name
    returns, values = np.asarray(experience.returns)[valid], VALUES[valid]
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained, abs=1e-5)
    position = np.array([0, 1 / 4, 2 / 4, 3 / 4, 0, 1 / 2])
    correlation = np.corrcoef(np.asarray(raw)[valid], position)[0, 1]
    assert metrics["critic/advantage_position_corr"] == pytest.approx(correlation, abs=1e-5)


def test_deciles_are_of_the_response_not_of_the_row():
    # 20 tokens: two per decile. 5 tokens: one in every second decile. The rest of that row is poison.
    mask = (np.arange(20)[None] < np.array([[20], [5]])).astype(np.float32)
    raw = np.where(mask > 0, np.arange(20)[None] + np.array([[0], [100]]), 1e9).astype(np.float32)
    metrics = experience_metrics(experience_of(mask, values=-raw), raw)
    for k in range(10):
        tokens = [2 * k, 2 * k + 1] + ([100 + k // 2] if k % 2 == 0 else [])
        assert float(metrics[f"critic/advantages/decile_{k}"]) == pytest.approx(np.mean(tokens)), k
        assert float(metrics[f"critic/values/decile_{k}"]) == pytest.approx(-np.mean(tokens)), k


def test_deciles_take_the_advantages_before_whitening():
    mask = np.ones((1, 10), np.float32)
    raw = np.arange(10, dtype=np.float32)[None]
    metrics = experience_metrics(experience_of(mask, advantages=raw * 0), raw)
    assert float(metrics["critic/advantages/decile_7"]) == 7
    assert float(metrics["critic/advantages/mean"]) == 0
    assert float(metrics["critic/advantage_position_corr"]) == pytest.approx(1, abs=1e-5)
