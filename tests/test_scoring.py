"""From scores to rewards, dynamic sampling, and RL with all of it at once."""

import json
import signal
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_run import on_one_device, tiny_config

from vcppo_jax.config_load import ConfigError
from vcppo_jax.data.packing import PackShape
from vcppo_jax.data.prompts import PromptRecord
from vcppo_jax.phases.collect import ScoredRollout, collect_varied
from vcppo_jax.phases.loop import Interrupted
from vcppo_jax.phases.pipeline import run_phases
from vcppo_jax.phases.rl import RL
from vcppo_jax.phases.scoring import Rewards
from vcppo_jax.rewards.score import Verdict
from vcppo_jax.run.checkpoint import read_params
from vcppo_jax.run.metrics import read_metrics
from vcppo_jax.run.processes import Shares
from vcppo_jax.train.minibatches import Samples


def rollout_of(scores, lengths=None, first=0, width=4):
    """A rollout whose rows carry their number, from `first` on, in every part."""
    count = len(scores)
    lengths = np.full(count, 2) if lengths is None else np.asarray(lengths)
    numbers = np.arange(first, first + count)
    tokens = np.repeat(numbers[:, None], width, axis=1).astype(np.int32)
    samples = Samples([[n] for n in numbers.tolist()], tokens, lengths, lambda n: PackShape(1, n, 8))
    return ScoredRollout(
        [PromptRecord((int(n),), str(n), "1", "s", False) for n in numbers],
        samples,
        numbers[:, None] * np.ones((1, width), np.float32),
        lengths == width,
        lambda tokens: str(tokens[0]),
        lambda: [Verdict(float(score), "correct" if score > 0 else "wrong") for score in scores],
        int(lengths.sum()),
        4 * count,
    )


def rewards_with(tmp_path, *words, moments=None):
    config = tiny_config(tmp_path, "phases=[value, rl]", *words)
    return Rewards(SimpleNamespace(config=config, run_dir=tmp_path), moments)


SCORES = np.array([1, -1, -1, 1], np.float32)


@pytest.mark.parametrize(
    ("words", "lengths", "expected"),
    [
        ((), [2] * 4, [1, -1, -1, 1]),
        (("reward.scale=zero_one",), [2] * 4, [1, 0, 0, 1]),
        (("reward.clip=0.5",), [2] * 4, [0.5, -0.5, -0.5, 0.5]),
        # Limit 12, of which the last quarter, three tokens, is punished: at 10 tokens by a third.
        (("reward.overlong_buffer_share=0.25",), [9, 10, 11, 12], [1, -1 - 1 / 3, -1 - 2 / 3, 0]),
        (
            ("reward.overlong_buffer_share=0.25", "reward.overlong_penalty=3"),
            [9, 10, 11, 12],
            [1, -2, -3, -2],
        ),
    ],
)
def test_scores_become_rewards(tmp_path, words, lengths, expected):
    rewards, meta, _ = rewards_with(tmp_path, *words).shape(SCORES, rollout_of(SCORES, lengths), {})
    np.testing.assert_allclose(rewards, expected, atol=1e-6)
    assert meta == {}


def test_running_normalisation_is_over_all_rewards_so_far(tmp_path):
    rewards = rewards_with(tmp_path, "reward.normalize=running")
    meta, seen = {}, []
    for scores in ([1, -1, -1, -1], [1, 1, 1, -1], [1, 1, -1, -1]):
        scores = np.asarray(scores, np.float32)
        seen += scores.tolist()
        meta = json.loads(json.dumps(meta))  # as a checkpoint keeps it
        shaped, meta, _ = rewards.shape(scores, rollout_of(scores), meta)
        expected = (scores - np.mean(seen)) / (np.std(seen, ddof=1) + 1e-6)
        np.testing.assert_allclose(shaped, expected, rtol=1e-4)
    again, unmoved, _ = rewards.shape(scores, rollout_of(scores), meta, learn=False)
    np.testing.assert_allclose(again, expected, rtol=1e-4)
    assert unmoved == meta


def test_rl_goes_on_from_the_moments_of_the_value_models_checkpoint(tmp_path):
    rewards = rewards_with(tmp_path, "reward.normalize=running", moments=[4.0, 0.0, 4.0])
    _, meta, _ = rewards.shape(SCORES, rollout_of(SCORES), {})
    assert meta["reward_moments"] == pytest.approx([8.0, 0.0, 8.0])


def test_a_reward_model_is_normalised_by_its_own_statistics(tmp_path, monkeypatch):
    class Scorer:
        def __init__(self, workspace, path):
            self.score_mean, self.score_std = (3.0, 2.0) if path == "phase" else (None, None)

        def __call__(self, samples):
            return samples.lengths.astype(np.float32)

    monkeypatch.setattr("vcppo_jax.phases.scoring.RewardScorer", Scorer)
    words = ("reward.source=model", "reward.normalize=reward_model", "reward.clip=1.0")
    rewards = rewards_with(tmp_path, *words, "reward.model=phase")
    rollout = rollout_of(SCORES, [1, 3, 4, 9])
    scores = rewards.scores(rollout)
    np.testing.assert_array_equal(scores, [1, 3, 4, 9])
    shaped, _, metrics = rewards.shape(scores, rollout, {})
    np.testing.assert_allclose(shaped, [-1, 0, 0.5, 1])
    assert metrics["reward/clipfrac"] == 0.25
    with pytest.raises(ConfigError, match=r"reward\.normalize=reward_model: directory does not say"):
        rewards_with(tmp_path, *words, "reward.model=directory")


def test_the_overlong_filter_takes_truncated_responses_out_of_the_loss(tmp_path):
    rollout = rollout_of(SCORES, [4, 2, 4, 3])
    kept = rewards_with(tmp_path, "reward.overlong_filter=true").loss_mask(rollout)
    assert kept.sum(axis=1).tolist() == [0, 2, 0, 3]
    assert rewards_with(tmp_path).loss_mask(rollout).sum() == 13


def varied(rounds, *, prompts=2, limit=10):
    """`collect_varied` over these rounds of scores, and the positions it asked for."""
    asked = []

    def sample(number, position):
        asked.append(position)
        return rollout_of(rounds[number], first=100 * number, width=4 + number)

    got = collect_varied(sample, position=7, prompts=prompts, group_size=2, rounds=limit)
    return got, asked


def rows(rollout):
    """The rows' numbers, which every part must agree on."""
    numbers = [int(rollout.text(row)) for row in range(len(rollout.records))]
    assert numbers == [int(record.prompt_text) for record in rollout.records]
    assert numbers == [prompt[0] for prompt in rollout.samples.prompts]
    assert numbers == rollout.samples.responses[:, 0].tolist()
    assert numbers == rollout.engine_logprobs[:, 0].astype(int).tolist()
    return numbers


def test_groups_of_equal_scores_are_sampled_anew():
    got, asked = varied([[1, 1, 1, -1], [-1, -1, -1, 1], [1, -1, 1, -1]])
    assert rows(got.rollout) == [2, 3, 102, 103]
    assert got.rollout.scores.tolist() == [1, -1, -1, 1]
    assert asked == [7, 9]
    assert got.position == 11
    assert got.metrics == {
        "dynamic_sampling/rounds": 2,
        "dynamic_sampling/varied_share": 0.5,
        "dynamic_sampling/filled": 0,
        "dynamic_sampling/acc/mean": 0.5,
    }


def test_what_lacks_after_the_last_round_is_filled_up():
    got, asked = varied([[1, 1, 1, -1], [-1, -1, 1, 1]], limit=2)
    assert rows(got.rollout) == [2, 3, 0, 1]
    assert len(asked) == 2
    assert got.metrics["dynamic_sampling/filled"] == 1


def test_groups_beyond_what_is_needed_are_left():
    got, _ = varied([[1, -1, -1, -1], [1, -1, 1, -1]])
    assert rows(got.rollout) == [0, 1, 100, 101]


def test_shares_are_worked_on_in_the_background_as_they_are_ready():
    may_end, batches = threading.Event(), []

    def double(items):
        batches.append(items)
        assert may_end.wait(10)
        return [2 * item for item in items]

    shares = Shares(4, double)
    shares.give([2])
    shares.give([0])
    shares.give([3, 1])
    may_end.set()  # only after the calls: who did the work in them would wait here
    assert shares.results == [0, 2, 4, 6]
    assert shares.results is shares.results
    assert [item for batch in batches for item in batch] == [2, 0, 3, 1]


def test_what_stops_the_work_on_shares_is_raised_where_they_are_needed():
    def fail(items):
        raise OSError("no process can be started")

    shares = Shares(2, fail)
    shares.give([0])
    shares.give([1])
    with pytest.raises(OSError, match="no process can be started"):
        _ = shares.results


EVERYTHING = (
    "phases=[rl]",
    "rl.steps=3",
    "rl.evaluate_every=0",
    "rl.critic_warmup_steps=1",
    "rl.dynamic_sampling=true",
    "rl.dynamic_sampling_rounds=2",
    "reward.normalize=running",
    "reward.clip=1.5",
    "reward.overlong_filter=true",
    "reward.overlong_buffer_share=0.5",
    "algorithm.kl_coef=0.05",
    "algorithm.kl_in=both",
    "algorithm.kl_target=0.001",
    "algorithm.kl_horizon=100",
    "algorithm.importance_correction=token",
    "algorithm.sft_coef=0.5",
    "algorithm.sft_batch_size=4",
    "algorithm.positive_nll_coef=0.1",
    "algorithm.entropy_coef=0.01",
    "algorithm.value_clip=0.2",
)


def some_are_right(responses, golds, **_):
    """Verdicts that follow from the response, and differ within some groups only."""
    return [Verdict(1.0 if len(text) % 3 == 0 else -1.0, "correct") for text in responses]


def test_everything_at_once_resumes_where_it_was(tmp_path, monkeypatch):
    on_one_device(monkeypatch)
    monkeypatch.setattr("vcppo_jax.phases.collect.verify", some_are_right)
    for name in ("whole", "torn"):
        (tmp_path / name).mkdir()
    run_phases(tiny_config(tmp_path / "whole", *EVERYTHING), ("rl",))

    step = RL.step

    def stopped_in_the_third(self, number, state, meta):
        if number == 3:
            raise Interrupted(signal.SIGTERM)
        return step(self, number, state, meta)

    config = tiny_config(tmp_path / "torn", *EVERYTHING)
    with monkeypatch.context() as patch:
        patch.setattr(RL, "step", stopped_in_the_third)
        with pytest.raises(Interrupted):
            run_phases(config, ("rl",))
    run_phases(config, ("rl",))

    whole, torn = (read_metrics(tmp_path / name / "run" / "rl") for name in ("whole", "torn"))
    clocks = ("timing_s/", "perf/throughput")
    for one, other in zip(whole, torn, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(clocks)} == {
            k: v for k, v in other.items() if not k.startswith(clocks)
        }
    first, second, third = whole
    assert not [name for name in first if name.startswith("actor/")]  # the critic warms up
    assert first["critic/vf_loss"] > 0
    # While the critic warms up the KL is 0 and says nothing; then it is below its target.
    assert second["critic/kl_coef"] == first["critic/kl_coef"] == 0.05
    assert third["critic/kl_coef"] == pytest.approx(0.05 * (1 - 0.2 * 16 / 100))
    assert third["critic/kl"] != 0
    assert "actor/kl_loss" in third
    for name in ("actor/sft_loss", "actor/positive_nll", "dynamic_sampling/rounds"):
        assert second[name] > 0, name
    assert second["reward/overlong_penalty/mean"] <= 0
    params = [
        read_params(tmp_path / name / "run" / "rl" / "checkpoints" / "3", subtree="actor/params")
        for name in ("whole", "torn")
    ]
    for one, other in zip(*map(jax.tree.leaves, params), strict=True):
        np.testing.assert_array_equal(one, other)
