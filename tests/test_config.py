"""The configuration: strict, frozen, one line per fault; includes, overrides and the shipped files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from vcppo_jax.config import Config
from vcppo_jax.config_checks import TASK_NAMES
from vcppo_jax.config_load import ConfigError, dump_config, iterate_keys, load_config, nearest_key
from vcppo_jax.data.tasks import TASKS

SHIPPED_DIR = Path(__file__).parent.parent / "configs"
# Those of studies have a test of their own.
SHIPPED = sorted(p for p in SHIPPED_DIR.rglob("*.yaml") if p.parent.name != "study")
GRPO = ("phases=[rl]", "algorithm.advantage=grpo", "rollout.n=2")
ALTERNATING = "data.train=task:alternating_sum"
MINIMAL = "run_dir: runs/x\nmodel: {path: builtin:tiny}\ndata: {train: 'task:running_sum'}\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def fault(path, *overrides) -> str:
    """The message, which must be one line that begins with the file."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message, message
    assert message.startswith(f"{path}"), message
    return message


def test_a_minimal_file_has_the_papers_defaults(write):
    config = load_config(write(MINIMAL))
    assert config.algorithm.lambda_actor == 0.95
    assert config.algorithm.lambda_critic == 1.0
    assert config.algorithm.gamma == 1.0
    assert (config.actor.learning_rate, config.critic.learning_rate) == (1e-6, 2e-6)
    assert config.phases == ("sft", "value", "rl", "evaluate")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.gama=1", "unknown key 'algorithm.gama'; did you mean 'algorithm.gamma'?"),
        ("rl.stepz=3", "unknown key 'rl.stepz'; did you mean 'rl.steps'?"),
        ("lambda_actor=1", "unknown key 'lambda_actor'; did you mean 'algorithm.lambda_actor'?"),
        ("zzzzzz=1", "unknown key 'zzzzzz'"),
        ("rollout_n=3", "unknown key 'rollout_n'; did you mean 'rollout.n'?"),
        ("algo.lambda_actor=1", "unknown key 'algo.lambda_actor'; did you mean 'algorithm.lambda_actor'?"),
        ("critc.epochs=2", "unknown key 'critc.epochs'; did you mean 'critic.epochs'?"),
        ("evaluation.top_p=1", "unknown key 'evaluation.top_p'; did you mean 'evaluate.top_p'?"),
        ("actr.learning_rate=1", "unknown key 'actr.learning_rate'; did you mean 'actor.learning_rate'?"),
        ("datas.train=x", "unknown key 'datas.train'; did you mean 'data.train'?"),
        ("data.tsk.digit=3", "unknown key 'data.tsk.digit'; did you mean 'data.task.digits'?"),
        ("rl.learning_rate=1", "unknown key 'rl.learning_rate'; did you mean 'actor.learning_rate'?"),
        ("grade.lr=1", "unknown key 'grade.lr'; grade has samples_per_prompt, easy_from, hard_to"),
        ("phase={rl: 1}", "unknown key 'phase'; did you mean 'phases'?"),
        ("optimizer={}", "unknown key 'optimizer'"),
    ],
)
def test_an_unknown_key_names_the_nearest(write, override, expected):
    path = write(MINIMAL)
    assert fault(path, override) == f"{path}: {expected}"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rl.steps=many", ("rl.steps", "integer", "'many'")),
        ("rl.steps=0", ("rl.steps", "greater than or equal to 1", "0")),
        ("rl.steps=1.5", ("rl.steps", "integer", "1.5")),
        ("algorithm.gamma=1.5", ("algorithm.gamma", "less than or equal to 1", "1.5")),
        ("algorithm.gamma=.nan", ("algorithm.gamma", "finite", "nan")),
        ("rollout.temperature=0", ("rollout.temperature", "greater than 0", "0")),
        ("algorithm.advantage=gea", ("algorithm.advantage", "'gae', 'grpo'", "'gea'")),
        ("model.path=3", ("model.path", "string", "3")),
        ("rl=3", ("rl", "RLSection", "3")),
        ("rl.steps=", ("rl.steps", "integer", "None")),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(write, override, parts):
    message = fault(write(MINIMAL), override)
    for part in parts:
        assert part in message


def test_an_unknown_section_that_is_like_none_names_those_there_are(write):
    message = fault(write(MINIMAL), "optimizer.lr=1")
    assert "unknown key 'optimizer.lr'; the sections are model, value_model, mesh, data, rollout" in message
    assert message.endswith("checkpoint, logging")


def test_every_key_of_a_misspelled_section_has_a_line(write):
    path = write(MINIMAL + "critc: {epochs: 2, eps: 1.0e-6}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert [line.rpartition("mean ")[2] for line in lines] == ["'critic.epochs'?", "'critic.eps'?"]


def test_every_fault_has_a_line_of_its_own(write):
    path = write(MINIMAL + "rl: {stepz: 1}\nseed: x\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{path}: ") for line in lines)


@pytest.mark.parametrize("key", ["run_dir", "model.path", "data.train"])
def test_a_missing_key_is_named(write, key):
    data = yaml.safe_load(MINIMAL)
    section, _, leaf = key.rpartition(".")
    del (data[section] if section else data)[leaf]
    message = fault(write(yaml.safe_dump(data)))
    assert f"{key}: is required; set it in the file or with {key}=VALUE" in message


def test_overrides_go_over_the_file_in_their_order(write):
    path = write(MINIMAL + "rl: {steps: 5, evaluate_every: 2}\n")
    words = [
        "rl.steps=6",
        "rl.steps=7",
        "actor.learning_rate=3e-6",
        "phases=[rl]",
        "data.system_prompt=hi = x",
    ]
    config = load_config(path, words)
    assert (config.rl.steps, config.rl.evaluate_every) == (7, 2)
    assert config.actor.learning_rate == 3e-6
    assert config.phases == ("rl",)
    assert config.data.system_prompt == "hi = x"


@pytest.mark.parametrize("word", ["rl.steps", "=3"])
def test_an_override_without_key_or_value_is_refused(write, word):
    with pytest.raises(ConfigError, match=r"expected key\.sub=value"):
        load_config(write(MINIMAL), [word])


def test_includes_lie_beneath_the_file_and_relative_to_it(write):
    write("seed: 1\nrl: {steps: 1, prompts_per_step: 512}\nactor: {epochs: 3}\n", "base/a.yaml")
    write("include: a.yaml\nseed: 2\n", "base/b.yaml")
    path = write("include: [base/b.yaml]\nrl: {steps: 9}\n" + MINIMAL)
    config = load_config(path)
    assert (config.seed, config.rl.steps, config.rl.prompts_per_step, config.actor.epochs) == (2, 9, 512, 3)
    over = write("rl: {steps: 11}\n", "over.yaml")
    assert load_config(path, [f"include={over.name}"]).rl.steps == 11
    assert load_config(path, [f"include={over.name}", "rl.steps=12"]).rl.steps == 12


def test_a_file_that_includes_itself_is_refused(write):
    write("include: run.yaml\n", "other.yaml")
    with pytest.raises(ConfigError, match="includes itself"):
        load_config(write("include: other.yaml\n" + MINIMAL))


def test_a_missing_include_is_named_with_the_files_that_lead_to_it(write):
    path = write("include: base/b.yaml\n" + MINIMAL)
    middle = write("include: [nowhere.yaml]\n", "base/b.yaml")
    missing = middle.with_name("nowhere.yaml")
    chain = f"{path}: include: {middle}: include: {missing}"
    assert fault(path) == f"{chain}: cannot read the configuration: No such file or directory"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run_dir: x\nrl: [1\n", "run.yaml:3: not valid YAML"),
        ("- a\n", "expected a mapping of keys at the top, got list"),
        ("", "expected a mapping of keys at the top, got NoneType"),
    ],
)
def test_files_that_are_no_configuration(write, text, expected):
    assert expected in fault(write(text))


def test_a_missing_file_and_a_directory(tmp_path):
    assert "No such file" in fault(tmp_path / "none.yaml")
    assert "directory" in fault(tmp_path)


def test_a_configuration_is_frozen_and_hashable(write):
    path = write(MINIMAL)
    config = load_config(path)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.rl.steps = 3
    assert hash(config) == hash(load_config(path))
    assert config == load_config(path)
    other = load_config(path, ["rl.steps=3"])
    assert other != config
    assert hash(other) != hash(config)


def test_what_is_dumped_loads_as_the_same(write):
    words = ["data.system_prompt='Ein ä: \"x\"'", "value.checkpoint_steps=[3, 9]", "algorithm.dual_clip=3"]
    config = load_config(write(MINIMAL), words)
    text = dump_config(config)
    assert load_config(write(text, "dumped.yaml")) == config
    leaves = {key.rpartition(".")[2] for key, _ in iterate_keys()}
    assert all(f"{leaf}:" in text for leaf in leaves)


def test_every_key_is_explained():
    unexplained = [key for key, field in iterate_keys() if not field.description]
    assert not unexplained


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["phases=[rl, value]"], "phases: expected some of sft, reward, value, rl, evaluate, once each"),
        (["phases=[rl, rl]"], "phases: expected some of"),
        (["phases=[]"], "phases: expected some of"),
        (["phases=[rl]", "algorithm.advantage=grpo"], "set rollout.n to 2 or more"),
        (["phases=[value, rl]", "algorithm.advantage=grpo", "rollout.n=2"], "remove value from phases"),
        (["value_model.init=reward_model"], "needs value_model.path, or reward among the phases"),
        (["value_model.init=checkpoint"], "value_model.init=checkpoint needs value_model.path"),
        (["value_model.path=x"], "value_model.path is set but value_model.init=policy"),
        (["value.mini_batch_size=100"], "value.prompts_per_step x rollout.n = 512 samples, which value.mini"),
        (["rl.mini_batch_size=100", "rollout.n=3"], "rl.prompts_per_step x rollout.n = 1536 samples"),
        (["train.row_tokens=3071"], "train.row_tokens=3071 is less than"),
        (["data.train=x.jsonl"], "sft.data: expected a file of demonstrations, or remove sft from phases"),
        (["data.train=x.jsonl", "phases=[rl]", "algorithm.sft_coef=1"], "set sft.data to a file of them"),
        (["data.train=x.jsonl", "phases=[reward]"], "reward_model.data: expected a file of pairs"),
        (["phases=[rl]", "algorithm.advantage=rloo"], "set rollout.n to 2 or more"),
        (["rl.dynamic_sampling=true"], "rl.dynamic_sampling compares the samples of a prompt"),
        (["rl.dynamic_sampling_rounds=3"], "needs rl.dynamic_sampling=true"),
        (["algorithm.sft_batch_size=3"], "algorithm.sft_batch_size=3 needs algorithm.sft_coef above 0"),
        (["rl.steps=3", "rl.critic_warmup_steps=3"], "leaves none of rl.steps=3 for the policy"),
        (
            ["phases=[rl]", "algorithm.advantage=reinforce_pp", "rl.critic_warmup_steps=1"],
            "has no value model: set rl.critic_warmup_steps to 0",
        ),
        (
            ["algorithm.advantage=rloo", "algorithm.lambda_actor=0.9"],
            "algorithm.lambda_actor=0.9 is read with algorithm.advantage=gae only, and",
        ),
        (
            ["algorithm.score_std=batch"],
            "algorithm.score_std=batch is read with algorithm.advantage=grpo only",
        ),
        (["algorithm.policy_loss=cispo", "algorithm.dual_clip=3"], "algorithm.policy_loss=ppo or gspo only"),
        (["algorithm.importance_cap=3"], "algorithm.importance_correction=token or sequence only"),
        (
            ["algorithm.length_adaptive_alpha=0.05", "algorithm.lambda_actor=0.9"],
            "run.yaml: algorithm.length_adaptive_alpha takes the place of lambda_actor",
        ),
        (["algorithm.kl_target=0.1"], "set kl_coef above 0"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_kind=k1"], "kl_kind=k1 as a loss pushes nowhere"),
        (["reward.source=model"], "reward.source=model needs reward.model"),
        (["reward.model=x"], "reward.model=x is read with reward.source=model only"),
        (["reward.source=model", "reward.model=x", "reward.scale=zero_one"], "reward.source=verifier only"),
        (["reward.normalize=reward_model"], "needs reward.source=model"),
        (["reward.overlong_penalty=2"], "needs reward.overlong_buffer_share"),
        (["grade.hard_to=0.9"], "run.yaml: grade.hard_to must be less than grade.easy_from"),
        (
            ["value_model.step=3", "value.steps=16", "value.checkpoint_steps=[8, 20]"],
            "kept for ever, one of 8, 16",
        ),
        (
            ["rollout.int8_weights=true"],
            "another policy than the one that is trained: set algorithm.importance",
        ),
        (["value_model.step=100", "phases=[rl]"], "which phases does not list"),
        (["algorithm.kl_horizon=5"], "algorithm.kl_horizon=5 needs algorithm.kl_target; without"),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_target=0.1", "algorithm.kl_horizon=100"],
            "algorithm.kl_horizon=100 is too short for steps of 512 samples",
        ),
        (["sft.steps=3", "sft.epochs=2"], "sft.epochs and sft.steps both say how long"),
        (["data.train=task:sum"], "no task 'sum'; expected task:NAME with one of running_sum"),
        (["data.validation=task:sum"], "no task 'sum'"),
        (["data.train=x.jsonl", "phases=[rl]", "rl.evaluate_every=2"], "set data.validation, or it to 0"),
        (["data.train=task:reasoning_gym/x"], "sft.data: expected a file of demonstrations"),
        (["value.settle_window=5"], "value.settle_window=5 needs value.settle=true"),
        (["value.settle_loss_tolerance=0.1"], "needs value.settle=true; without it, leave value.settle_loss"),
        (["value.settle_variance_tolerance=0.1"], "needs value.settle=true"),
        (["value.settle=true", "value.steps=11"], "never stop before value.steps=11: it takes"),
        (["value.settle=true", "value.held_out_every=10"], "measurements, 110 steps; set value.steps above"),
        (["data.task.additions=5"], "data.task.additions=5 needs data.train=task:alternating_sum"),
        ([ALTERNATING, "data.task.digits=5"], "data.task.digits=5 needs data.train=task:running_sum"),
        (["logging.wandb_project=p"], "logging.wandb_project=p needs logging.wandb=true"),
        (["mesh.fsdp=0"], "run.yaml: mesh: expected positive sizes"),
        (["mesh.data=-1"], "at most one of them -1, got data=-1, fsdp=-1, sequence=1, tensor=1"),
        (["seed=4294967296"], "seed: "),
        (["data.task.digits=1"], "data.task.digits: "),
    ],
)
def test_combinations_that_make_no_sense_are_refused(write, words, expected):
    assert expected in fault(write(MINIMAL), *words)


@pytest.mark.parametrize(
    "words",
    [
        ["phases=[rl]", "algorithm.advantage=grpo", "rollout.n=2"],
        ["value_model.init=checkpoint", "value_model.path=runs/x/value"],
        ["phases=[rl]", "value.mini_batch_size=100"],  # a phase that does not run
        ["train.row_tokens=3072"],
        ["data.train=x.jsonl", "phases=[value, rl]"],
        ["data.train=x.jsonl", "sft.data=y.jsonl"],
        ["phases=[reward, value, rl]", "value_model.init=reward_model"],
        ["phases=[rl]", "algorithm.advantage=grpo", "algorithm.score_mean=batch", "algorithm.score_std=none"],
        [
            "algorithm.kl_coef=0.1",
            "algorithm.kl_kind=k1",
            "algorithm.kl_in=reward",
            "algorithm.kl_target=0.1",
        ],
        ["phases=[rl]", "algorithm.advantage=grpo", "rollout.n=2", "algorithm.whiten_advantages=true"],
        ["algorithm.policy_loss=gspo", "algorithm.dual_clip=3", "algorithm.importance_correction=sequence"],
        [*GRPO, "critic.beta2=0.95", "critic.warmup_steps=3"],  # of a file for several algorithms
        ["value.settle=true", "value.steps=12"],
        ["phases=[rl]", "value.settle=true", "value.steps=3"],
        ["value.steps=4", "value.checkpoint_steps=[8, 16]"],  # a shorter run of a file
        ["data.task.digits=3", "data.train=a.jsonl", "phases=[rl]"],  # hard.jsonl of a run of that task
        [ALTERNATING, "data.validation=task:running_sum", "data.task.digits=3", "data.task.additions=3"],
        ["logging.wandb=true", "logging.wandb_project=p"],
    ],
)
def test_their_neighbours_are_not(write, words):
    assert isinstance(load_config(write(MINIMAL), words), Config)


def test_a_phase_alone_is_checked_whatever_phases_says(write):
    path = write(MINIMAL + "phases: [rl]\nrollout: {n: 2}\nalgorithm: {advantage: rloo}\n")
    assert load_config(path).phases == ("rl",)
    assert load_config(path, phase="sft").phases == ("rl",)
    with pytest.raises(ConfigError, match="remove value from phases"):
        load_config(path, phase="value")
    with pytest.raises(ConfigError, match=r"sft\.data: expected a file of demonstrations"):
        load_config(path, ["data.train=x.jsonl"], phase="sft")


def test_a_key_that_stands_twice_is_refused(write):
    path = write(MINIMAL + "rl: {steps: 1}\nrl: {steps: 2}\n")
    assert fault(path) == f"{path}:5: not valid YAML: the key 'rl' stands here twice"
    merged = MINIMAL + "sft: &a {steps: 1}\nreward_model: {<<: *a, steps: 2}\n"
    assert load_config(write(merged)).reward_model.steps == 2


def test_an_include_is_a_file_or_a_list_of_files(write):
    assert "include: expected a file or a list of files, got 3" in fault(write(MINIMAL + "include: 3\n"))
    assert "include: expected a file or a list of files, got None" in fault(write(MINIMAL + "include:\n"))


def test_the_tasks_of_the_configuration_are_those_there_are():
    assert set(TASK_NAMES) == set(TASKS)


def test_nearest_key_of_nonsense_is_none():
    assert nearest_key("qqqqqqqq") is None


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_configurations_load(path):
    """As they are, or once the user has said where the model and the data lie."""
    if path.parent.name == "algorithms":  # a fragment, which goes over the configuration of a run
        words = ["phases=[sft, rl, evaluate]"]
        config = load_config(SHIPPED_DIR / "quickstart.yaml", [f"include=algorithms/{path.name}", *words])
        given = yaml.safe_load(path.read_text())
        loaded = config.model_dump(mode="json")
        for section, keys in given.items():
            assert {key: loaded[section][key] for key in keys} == keys
        return
    paths = {
        "run_dir": "runs/x",
        "model": {"path": "models/x"},
        "data": {"train": "train.jsonl", "validation": "held_out.jsonl"},
    }
    words = []
    for section, default in paths.items():
        present = yaml.safe_load(path.read_text()).get(section)
        for key, value in default.items() if isinstance(default, dict) else [(None, default)]:
            if present is None or (key is not None and key not in present):
                words.append(f"{section}.{key}={value}" if key else f"{section}={value}")
    load_config(path, words)


def test_configurations_are_shipped():
    assert "quickstart.yaml" in [path.name for path in SHIPPED]
