"""The reward model: its data, its gradient, its phase, and the scores it gives."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import assert_trees_close, random_params, random_tokens
from tiny_networks import tiny_config as tiny_model
from tiny_run import on_one_device, tiny_config

import vcppo_jax as vc
from vcppo_jax.cli import main
from vcppo_jax.config_load import ConfigError
from vcppo_jax.data.packing import PackShape
from vcppo_jax.data.prompts import PreferencePair, preference_pairs
from vcppo_jax.data.records import parse_row
from vcppo_jax.data.tasks import SumTask, digit_sum, preferences, solution
from vcppo_jax.data.tokenizer import builtin_model_dir, encode_chat, encode_response, load_tokenizer
from vcppo_jax.models.networks import ValueModel
from vcppo_jax.phases.artifacts import export
from vcppo_jax.phases.loop import Interrupted, Signals
from vcppo_jax.phases.networks import starting_value_model
from vcppo_jax.phases.pipeline import run_phases, summary_rows
from vcppo_jax.phases.reward import (
    ResponseEnds,
    RewardScorer,
    pair_loss,
    pair_metrics,
    pair_samples,
    split_pairs,
)
from vcppo_jax.phases.workspace import Workspace
from vcppo_jax.run.checkpoint import read_params
from vcppo_jax.run.metrics import read_metrics
from vcppo_jax.train.minibatches import Samples
from vcppo_jax.train.objectives import ScoreObjective, ValueScore
from vcppo_jax.train.updates import accumulate, score_tokens

STEPS = 24
RUN = (
    "phases=[reward]",
    "mesh.fsdp=1",
    "data.task.train_problems=256",
    "reward_model.batch_size=32",
    f"reward_model.steps={STEPS}",
    "reward_model.learning_rate=0.003",
    "checkpoint.every=8",
    "checkpoint.keep_last=8",
)


# Data.


def test_rows_of_pairs_in_the_forms_that_preference_sets_have():
    user = {"role": "user", "content": "Q"}
    chosen, rejected = ([user, {"role": "assistant", "content": text}] for text in "AB")
    text = parse_row({"prompt": "Q", "chosen": "A", "rejected": "B"}, where="w", source="s")
    messages = parse_row({"prompt": "Q", "chosen": chosen, "rejected": rejected}, where="w", source="s")
    last = parse_row(
        {"prompt": [user], "chosen": chosen[1:], "rejected": rejected[1:]}, where="w", source="s"
    )
    implicit = parse_row({"chosen": np.array(chosen), "rejected": rejected}, where="w", source="s")
    assert [(row.chosen, row.rejected) for row in (text, messages, last, implicit)] == [("A", "B")] * 4
    assert [row.prompt for row in (text, messages, last, implicit)] == ["Q", "Q", (user,), (user,)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"prompt": "Q", "chosen": [{"role": "user", "content": "A"}]},
            "w: chosen: expected the last message to be the assistant's, got the user's",
        ),
        ({"prompt": "Q", "rejected": []}, "w: rejected: expected the last .* got no message"),
        ({"prompt": "Q", "chosen": {"text": "A"}}, "w: chosen: expected a text or a number, got dict"),
        ({"prompt": "Q", "rejected_truncated": "no"}, "w: rejected_truncated: expected true or false"),
        ({"chosen": "A", "rejected": "B"}, "w: no prompt: expected one of prompt, problem, question"),
        (
            {
                side: [{"role": "user", "content": side}, {"role": "assistant", "content": "A"}]
                for side in ("chosen", "rejected")
            },
            "w: expected chosen and rejected to answer the same messages",
        ),
    ],
)
def test_malformed_pairs_are_named(columns, message):
    with pytest.raises(ValueError, match=message):
        parse_row(columns, where="w", source="s")


def test_pairs_become_token_ids_and_what_is_dropped_is_counted():
    tokenizer = load_tokenizer(builtin_model_dir("tiny"))
    texts = [("ab", "cd"), ("ab", " "), ("ab", "ab"), ("ab", "abcdefgh"), ("abcdefgh", "ab")]
    rows = [parse_row({"prompt": "P", "chosen": a, "rejected": b}, where="w", source="s") for a, b in texts]
    limit = len(encode_response(tokenizer, "ab")) + 2
    options = {"name": "f", "max_prompt_tokens": 30, "max_response_tokens": limit}
    pairs, report = preference_pairs(rows, tokenizer, **options)
    ids = (encode_chat(tokenizer, "P"), *(encode_response(tokenizer, text) for text in ("ab", "cd")))
    assert pairs == [PreferencePair(*map(tuple, ids))]
    assert pairs[0].rejected_ids[-1] == tokenizer.eos_token_id
    cut = parse_row(
        {"prompt": "P", "chosen": "ab", "rejected": "cd", "rejected_truncated": True}, where="w", source="s"
    )
    (pair,), _ = preference_pairs([cut], tokenizer, **options)
    assert pair.rejected_ids == pairs[0].rejected_ids[:-1]
    assert str(report) == (
        "f: 1 of 5 pairs kept (dropped: 1 empty, 1 of two responses that are the same, 2 too long)"
    )
    row = parse_row({"prompt": "P", "chosen": "A"}, where="f.jsonl:3", source="s")
    with pytest.raises(ValueError, match=r"f\.jsonl:3: no rejected response: expected the columns"):
        preference_pairs([row], tokenizer, **options)


def test_the_built_in_pairs_are_a_solution_and_an_unfinished_or_wrong_response():
    task = SumTask(digits=12, early_exit_hazard=0.03, step_error_rate=0.2)
    made = preferences(task, 1000, seed=0)
    assert made[:50] == preferences(task, 50, seed=0) != preferences(task, 50, seed=1)
    unfinished, cuts, early = 0, set(), 0
    for problem, chosen, rejected, truncated in made:
        digits = list(map(int, problem.prompt.split("\n")[1].split()))
        assert chosen == solution(digit_sum(digits))
        assert truncated == ("boxed" not in rejected)
        if truncated:
            assert chosen.startswith(rejected)
            unfinished += 1
            cuts.add(len(rejected))
        else:
            assert rejected[-2] != problem.answer
            early += rejected.count("+") < 12
    assert abs(unfinished / 1000 - 0.5) < 0.08  # five standard deviations
    assert abs(early / 1000 - 0.25) < 0.07
    assert cuts == set(range(len("<think>"), len("<think>") + 4 * 12 + 1))


def test_the_pairs_of_a_prompt_are_held_out_together():
    pairs = [PreferencePair((prompt,), (i,), (i + 1,)) for prompt in range(20) for i in range(3)]
    train, held_out = split_pairs(pairs, share=0.2, seed=0)
    assert len(held_out) == 12
    assert sorted([*train, *held_out], key=pairs.index) == pairs
    assert not {pair.prompt_ids for pair in train} & {pair.prompt_ids for pair in held_out}
    assert split_pairs(pairs, share=0.2, seed=0)[1] == held_out != split_pairs(pairs, share=0.2, seed=1)[1]
    assert [len(part) for part in split_pairs(pairs[2:4], share=0.01, seed=0)] == [1, 1]
    with pytest.raises(ValueError, match=r"reward_model\.data: expected pairs of two prompts at least"):
        split_pairs(pairs[:3], share=0.2, seed=0)


# Gradient.

MODEL = tiny_model("qwen3")
LENGTHS = np.array([4, 1, 5, 2, 5, 3])
PROMPTS = [random_tokens(n, seed=n).tolist() for n in (2, 3, 1)] * 2


def samples():
    responses = random_tokens(6, 5, seed=9) * (np.arange(5) < LENGTHS[:, None])
    return Samples(PROMPTS, responses, LENGTHS, lambda count: PackShape(count, 1, 9))


def direct_scores(params):
    """[6]: each sequence alone in its row, the value at its last token."""
    rows = [[*prompt, *response[:n]] for prompt, response, n in zip(PROMPTS, samples().responses, LENGTHS)]
    tokens = np.array([row + [0] * (9 - len(row)) for row in rows])
    values = vc.values(ValueModel(params, MODEL), tokens)
    return values[np.arange(6), [len(row) - 1 for row in rows]]


def test_the_gradient_in_two_passes_is_that_of_the_bradley_terry_loss():
    params = random_params(MODEL, head="value")
    scores = direct_scores(params)
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: pair_loss(direct_scores(p))[0]))(params)
    # Several sequences in a row, and the two of a pair in different micro-batches.
    ends = ResponseEnds(samples(), PackShape(2, 1, 22))
    assert ends.packing.micro_batches == 2
    count = jnp.int32(ends.packing.micro_batches)
    packed = jax.jit(lambda p, b: score_tokens(p, b, count, score=ValueScore(MODEL)))
    read = ends.read(ends.packing.gather(packed(params, ends.packing.batch({}))))
    np.testing.assert_allclose(read, scores, rtol=1e-5, atol=1e-6)
    metrics, score_gradients = pair_metrics(read, "")
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert metrics["acc"] == pytest.approx(float(np.mean(scores[:3] > scores[3:])))
    assert metrics["margin"] == pytest.approx(float(np.mean(scores[:3] - scores[3:])), rel=1e-5)
    batch = ends.packing.batch({"score_gradients": ends.field(score_gradients)})
    ours, _, _ = jax.jit(lambda p, b: accumulate(ScoreObjective(MODEL), p, b, count))(params, batch)
    assert np.abs(gradient["embed"]).max() > 1e-3
    assert_trees_close(ours, gradient, rtol=1e-4, atol=1e-6)


# The phase.


@pytest.fixture(scope="module", autouse=True)
def _one_device():
    with pytest.MonkeyPatch.context() as patch:
        on_one_device(patch)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reward")
    run_phases(tiny_config(directory, *RUN), ("reward",))
    return directory


@pytest.fixture
def workspace(trained):
    with Workspace(tiny_config(trained, *RUN)) as workspace:
        yield workspace


def test_the_phase_learns_the_order_of_held_out_pairs(trained):
    summary = json.loads((trained / "run" / "reward" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["held_out/acc"] > 0.7
    rows = read_metrics(trained / "run" / "reward")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows[0]["held_out/loss"] == pytest.approx(np.log(2), abs=1e-6)  # the new head is zero
    assert rows[-1]["held_out/loss"] == summary["held_out/loss"] < 0.5
    assert {"reward/loss", "reward/acc", "reward/margin", "reward/grad_norm"} <= set(rows[-1])
    assert "Reward model" in (trained / "run" / "report.html").read_text()
    assert summary_rows(trained / "run") == [
        ("reward", str(STEPS), f"{summary['held_out/acc']:.1%}", "", "", "")
    ]


def test_an_interrupted_phase_ends_as_one_that_never_stopped(trained, tmp_path, monkeypatch):
    calls = []

    def interrupt_before_step_11(signals):
        calls.append(None)
        if len(calls) == 12:
            raise Interrupted(2)

    config = tiny_config(tmp_path, *RUN)
    with monkeypatch.context() as patch:
        patch.setattr(Signals, "check", interrupt_before_step_11)
        with pytest.raises(Interrupted):
            run_phases(config, ("reward",))
    phase = tmp_path / "run" / "reward"
    assert max(int(p.name) for p in (phase / "checkpoints").iterdir() if p.name.isdigit()) == 10
    run_phases(config, ("reward",))
    states = [
        jax.tree.leaves(read_params(run / "run" / "reward" / "checkpoints" / str(STEPS), subtree="critic"))
        for run in (tmp_path, trained)
    ]
    assert len(states[0]) > 20
    assert [np.asarray(x).tobytes() for x in states[0]] == [np.asarray(x).tobytes() for x in states[1]]
    assert (phase / "summary.json").read_text() == (trained / "run" / "reward" / "summary.json").read_text()
    lines = [
        [{k: v for k, v in row.items() if not k.startswith("timing_s/")} for row in read_metrics(run)]
        for run in (phase, trained / "run" / "reward")
    ]
    assert lines[0] == lines[1]


def test_a_phase_and_its_export_give_the_same_scores(trained, workspace, tmp_path):
    phase = trained / "run" / "reward"
    _, held_out = split_pairs(workspace.pairs(), share=0.1, seed=0)
    pairs = pair_samples(workspace, held_out)
    scorer = RewardScorer(workspace, phase)
    scores = scorer(pairs)
    assert scores.dtype == np.float32
    summary = json.loads((phase / "summary.json").read_text())
    assert (scorer.score_mean, scorer.score_std) == (summary["score_mean"], summary["score_std"])
    assert scores.mean() == pytest.approx(summary["score_mean"], abs=1e-5)
    assert scores.std() == pytest.approx(summary["score_std"], rel=1e-5)
    exported = RewardScorer(workspace, export(phase, tmp_path / "hf", network="critic"))
    assert (exported.score_mean, exported.score_std) == (None, None)
    np.testing.assert_allclose(exported(pairs), scores, rtol=1e-6)
    # A row alone: the value at the last token, EOS included.
    row = [*pairs.prompts[0], *pairs.responses[0, : pairs.lengths[0]].tolist()]
    assert row[-1] in workspace.eos_ids
    alone = vc.values(vc.load_value_model(phase), [row])[0, -1]
    assert scores[0] == pytest.approx(float(alone), rel=1e-4)
    earlier = RewardScorer(workspace, phase / "checkpoints" / "8")
    assert earlier.score_mean is None
    assert not np.allclose(earlier(pairs), scores)


def test_the_value_model_starts_from_this_runs_reward_model(trained, tmp_path):
    changes = ("phases=[reward,value]", "value_model.init=reward_model")
    with Workspace(tiny_config(trained, *RUN, *changes)) as workspace:
        policy = workspace.starting_policy()
        model, origin = starting_value_model(workspace, policy, "value")
        assert origin == f"value model from {trained / 'run' / 'reward' / 'checkpoints'}; head loaded"
        reward_model = vc.load_value_model(trained / "run")
        assert_trees_close(model.params, reward_model.params, rtol=0)
        assert np.any(model.params["score"]["kernel"])
    with (
        Workspace(tiny_config(tmp_path, *RUN, *changes)) as workspace,
        pytest.raises(ConfigError, match=r"holds no finished reward model; run `vcppo reward`"),
    ):
        starting_value_model(workspace, policy, "value")


def test_a_head_that_was_never_trained_and_another_tokenizer_are_refused(trained, workspace, tmp_path):
    untrained = export_of_a_policy(workspace, tmp_path / "policy")
    with pytest.raises(ConfigError, match="expected a reward model, got a model whose scalar head is new"):
        RewardScorer(workspace, untrained)
    other = shutil.copytree(trained / "run" / "reward", tmp_path / "other")
    file = other / "value_model" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = vocabulary["1"], vocabulary["2"]
    content["model"]["vocab"] = vocabulary | {"1": two, "2": one}
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"tokenizer, whose token '1' is {one}; here it is {two}"):
        RewardScorer(workspace, other)


def export_of_a_policy(workspace, out):
    return vc.models.hf.export_policy(workspace.base_policy(), out, source_dir=workspace.model_dir)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "P", "chosen": "A"}', "pairs.jsonl:1: no rejected response"),
        ('{"prompt": "P", "chosen": "A", "rejected": [1]}', "pairs.jsonl:1: rejected: expected messages"),
        ('{"prompt": "P", "chosen": "A", "rejected": "A"}', "pairs.jsonl: 0 of 1 pairs kept"),
        ('{"prompt": "P", "chosen": "A", "rejected": "B"}', "expected pairs of two prompts at least"),
    ],
)
def test_bad_files_end_the_command_with_one_line(tmp_path, capsys, monkeypatch, line, message):
    monkeypatch.setattr("vcppo_jax.cli._configure_jax", lambda: None)
    (tmp_path / "pairs.jsonl").write_text(line + "\n")
    config = tmp_path / "c.yaml"
    config.write_text(
        f"run_dir: {tmp_path / 'run'}\nmodel: {{path: 'builtin:tiny', init: random}}\n"
        f"data: {{train: {tmp_path / 'none.jsonl'}}}\nsft: {{data: x}}\nphases: [reward]\n"
        f"reward_model: {{data: {tmp_path / 'pairs.jsonl'}}}\n"
    )
    assert main(["reward", str(config)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]
