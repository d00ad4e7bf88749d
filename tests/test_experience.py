"""From scores to advantages and returns, and the metrics of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vcppo_jax.train.experience import AdvantageSettings, build_experience, experience_metrics
from vcppo_jax.types import Experience

VCPPO = AdvantageSettings(
    advantage="gae",
    group_size=1,
    gamma=1.0,
    lambda_actor=0.95,
    lambda_critic=1.0,
    whiten=False,
    kl_reward_coef=0.0,
    kl_kind="k1",
)
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32)
SCORES = np.array([1.0, -1.0], np.float32)
VALUES = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, -0.5, 7.0, 7.0]], np.float32)
OLD = np.array([[-1.0, -2.0, -0.5, -0.1], [-0.3, -0.7, 9.0, 9.0]], np.float32)
REF = OLD - np.array([[0.2, -0.1, 0.4, 0.3], [0.5, 0.0, 3.0, 3.0]], np.float32)


def build(scores=SCORES, mask=MASK, values=VALUES, **changes):
    settings = dataclasses.replace(VCPPO, **changes)
    return build_experience(scores, mask, OLD, REF, values, settings=settings)


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
    experience, _ = build(kl_reward_coef=0.1)
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
    settings = dataclasses.replace(VCPPO, advantage="grpo", group_size=2, whiten=True)
    experience, raw = build_experience(scores, mask, zeros, zeros, zeros, settings=settings)
    # (1, -1): mean 0, std sqrt(2); (1, 1): nothing to compare. No whitening over the batch.
    half = 2**-0.5
    close(experience.advantages, [[half, half], [-half, 0], [0, 0], [0, 0]], atol=1e-5)
    close(raw, experience.advantages)
    close(experience.rewards, [[0, 1], [-1, 0], [0, 1], [0, 1]])


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
