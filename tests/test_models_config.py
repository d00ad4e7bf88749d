"""Reading config.json, and the table of weights that derives from it."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import pytest
import torch
import transformers as tr
from tiny_networks import CONFIGS, LINEAR, LLAMA3, SIZES, random_params, random_tokens, tiny_config

from vcppo_jax.models import hf
from vcppo_jax.models.config import ModelConfig, RopeConfig, model_config
from vcppo_jax.models.decoder import hidden_states, rope_frequencies
from vcppo_jax.models.heads import logits
from vcppo_jax.models.specs import count_parameters, init_params, weight_specs
from vcppo_jax.sharding import make_mesh

LLAMA = CONFIGS["llama"]


def without(key: str) -> dict:
    return {name: value for name, value in LLAMA.items() if name != key}


def test_every_field_of_a_llama():
    config = model_config(
        {**LLAMA, "head_dim": 24, "eos_token_id": [7, 3]}, compute_dtype="bfloat16", remat="dots"
    )
    assert config == ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        rms_norm_eps=1e-5,
        rope=RopeConfig("default", 10_000.0),
        max_position_embeddings=64,
        tie_word_embeddings=False,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        initializer_range=0.2,
        eos_token_ids=(3, 7),
        compute_dtype="bfloat16",
        remat="dots",
    )
    assert hash(config) == hash(dataclasses.replace(config))


def test_families_differ_in_biases_norms_and_head_width():
    def traits(case: str, **changes):
        config = tiny_config(case, **changes)
        return config.qkv_bias, config.attention_out_bias, config.mlp_bias, config.qk_norm, config.head_dim

    assert traits("llama") == (False, False, False, False, 8)
    assert traits("llama_biases") == (True, True, True, False, 8)
    assert traits("qwen2", attention_bias=False) == (True, False, False, False, 8)
    assert traits("qwen3") == (False, False, False, True, 16)
    assert traits("qwen3", head_dim=None, attention_bias=True) == (True, True, False, True, 128)
    assert tiny_config("llama", num_key_value_heads=None).num_kv_heads == SIZES["num_attention_heads"]


ROPES = {
    "default": ({}, RopeConfig("default", 5e5)),
    "linear": (LINEAR, RopeConfig("linear", 5e5, factor=2.5)),
    "llama3": (LLAMA3, RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 16)),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_in_the_spellings_of_transformers_4_and_5(kind):
    scaling, expected = ROPES[kind]
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": scaling or None},
        {"rope_theta": 5e5, "rope_scaling": older or None},
        {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": 5e5}, "rope_theta": 1.0},
    ]
    for spelling in spellings:
        assert tiny_config("llama", **spelling).rope == expected


def test_llama3_rope_takes_the_context_of_the_model_unless_given():
    scaling = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    assert tiny_config("llama", rope_scaling=scaling).rope.original_max_position_embeddings == 64


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_saved_by_transformers_reads_the_same(case, tmp_path):
    tr.AutoConfig.for_model(**CONFIGS[case]).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written
    plain = dataclasses.replace(model_config(CONFIGS[case]), eos_token_ids=())
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert dataclasses.replace(model_config(source), eos_token_ids=()) == plain


def test_eos_ids_join_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 5}))
    assert model_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2, 5]}))
    assert model_config(tmp_path).eos_token_ids == (2, 5, 9)
    assert model_config(tmp_path / "config.json").eos_token_ids == (2, 5, 9)


REFUSED = {
    "model_type": ({"model_type": "gemma3"}, r"model_type 'gemma3' .*llama, qwen2, qwen3"),
    "no_model_type": ({"model_type": None}, r"model_type None"),
    "moe": ({"num_experts": 8}, r"num_experts: mixtures of experts"),
    "local_experts": ({"num_local_experts": 8}, r"num_local_experts: mixtures of experts"),
    "window": ({"use_sliding_window": True}, r"use_sliding_window: .*expected false"),
    "layer_types": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types: 'sliding_attention'",
    ),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act 'gelu'"),
    "heads": ({"num_key_value_heads": 3}, r"num_attention_heads 4 .*num_key_value_heads 3"),
    "kv_text": ({"num_key_value_heads": "2"}, r"num_key_value_heads: expected a positive integer, got '2'"),
    "odd_head": ({"head_dim": 7}, r"head_dim: expected an even number .*got 7"),
    "zero": ({"num_hidden_layers": 0}, r"num_hidden_layers: expected a positive integer, got 0"),
    "boolean": ({"vocab_size": True}, r"vocab_size: expected a positive integer, got True"),
    "eps": ({"rms_norm_eps": "1e-5"}, r"rms_norm_eps: expected a positive number, got '1e-5'"),
    "theta": ({"rope_theta": 0}, r"rope_theta: expected a positive number, got 0"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4}}, r"rope_scaling: rope type 'yarn'"),
    "yarn5": ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters: rope type 'yarn'"),
    "rope_text": ({"rope_scaling": "linear"}, r"rope_scaling: expected an object, got 'linear'"),
    "no_factor": ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
    "factor_null": ({"rope_scaling": {**LINEAR, "factor": None}}, r"rope_scaling: factor: .*got None"),
    "no_band": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
        r"rope_parameters\.low_freq_factor is missing",
    ),
    "partial": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_the_decoder_does_not_compute(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^config: {message}") as error:
        model_config({**LLAMA, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        "max_position_embeddings",
    ],
)
def test_names_a_missing_key(key):
    with pytest.raises(ValueError, match=rf"^config: {key}: expected a positive integer, got None"):
        model_config(without(key))


def test_refuses_run_time_choices_that_do_not_exist():
    with pytest.raises(ValueError, match=r"compute_dtype: .*float32, bfloat16, got 'float16'"):
        model_config(LLAMA, compute_dtype="float16")
    with pytest.raises(ValueError, match=r"remat: .*none, full, dots, got 'some'"):
        model_config(LLAMA, remat="some")
    with pytest.raises(ValueError, match=r"head: expected 'lm' or 'value', got 'reward'"):
        weight_specs(tiny_config("llama"), head="reward")


def test_refuses_files_that_hold_no_config(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: No such file"):
        model_config(tmp_path)
    file.write_text('{\n "model_type": "llama",\n oops}')
    with pytest.raises(ValueError, match=r"config\.json:3: not valid JSON"):
        model_config(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON object, got list"):
        model_config(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"config\.json: not UTF-8 text"):
        model_config(tmp_path)


# Fields of the config that change the numbers and no shape: the same parameters give other logits.
LOGIT_FIELDS = {
    "rms_norm_eps": {"rms_norm_eps": 1e-2},
    "rope_theta": {"rope_theta": 1e3},
    "rope_scaling": {"rope_scaling": LINEAR},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    # 4 heads of 8 and 2 of 16 have the same kernels, as have 2 kv heads of 8 and 1 of 16.
    "grouping": {"num_attention_heads": 2, "num_key_value_heads": 1},
}
ROPE_FIELDS = {
    "kind": (LINEAR, {"rope_type": "default"}),
    "factor": (LINEAR, {"factor": 4.0}),
    "llama3_factor": (LLAMA3, {"factor": 2.0}),
    "llama3_low": (LLAMA3, {"low_freq_factor": 0.1}),
    "llama3_high": (LLAMA3, {"high_freq_factor": 2.0}),
    "llama3_original": (LLAMA3, {"original_max_position_embeddings": 32}),
}


@partial(jax.jit, static_argnums=0)
def compiled_logits(config: ModelConfig, params, tokens):
    return logits(params, config, hidden_states(params, config, tokens))


def forward(config: ModelConfig, params) -> np.ndarray:
    return np.asarray(compiled_logits(config, params, random_tokens(1, 24)))


@pytest.mark.parametrize("changes", LOGIT_FIELDS.values(), ids=LOGIT_FIELDS)
def test_field_changes_the_logits(changes):
    before, after = tiny_config("llama"), tiny_config("llama", **changes)
    params = random_params(before)
    assert np.abs(forward(before, params) - forward(after, params)).max() > 1e-3


@pytest.mark.parametrize("case", ROPE_FIELDS)
def test_field_changes_the_rope(case):
    scaling, changes = ROPE_FIELDS[case]
    before, after = (
        rope_frequencies(tiny_config("llama", rope_scaling=rope).rope, 8)
        for rope in (scaling, {**scaling, **changes})
    )
    assert before.dtype == np.float32
    assert np.abs(before / after - 1).max() > 0.05


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"vocab_size": 65}),
        ("llama", {"hidden_size": 64}),
        ("llama", {"intermediate_size": 64}),
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"num_attention_heads": 8, "head_dim": 8}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"head_dim": 16}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"model_type": "llama"}),
        ("qwen3", {"model_type": "llama"}),
    ],
)
def test_field_changes_the_weights(family, changes):
    before, after = tiny_config(family), tiny_config(family, **changes)
    assert weight_specs(before, head="lm") != weight_specs(after, head="lm")


@pytest.mark.parametrize("case", CONFIGS)
def test_parameter_counts_are_those_of_transformers(case):
    hf_config = tr.AutoConfig.for_model(**CONFIGS[case], num_labels=1)
    with torch.device("meta"):
        policy = tr.AutoModelForCausalLM.from_config(hf_config)
        model = tr.AutoModelForSequenceClassification.from_config(hf_config)
    assert count_parameters(weight_specs(tiny_config(case), head="lm")) == policy.num_parameters()
    assert count_parameters(weight_specs(tiny_config(case), head="value")) == model.num_parameters()
    with_bias = weight_specs(tiny_config(case), head="value", head_bias=True)
    assert count_parameters(with_bias) == model.num_parameters() + 1


def test_linear_rope_equals_transformers(tmp_path):
    model = tr.AutoModelForCausalLM.from_config(tr.AutoConfig.for_model(**CONFIGS["llama_linear"])).eval()
    model.save_pretrained(tmp_path)
    policy = hf.load_policy(tmp_path)
    assert policy.config.rope == RopeConfig("linear", 1e4, factor=2.5)
    with torch.no_grad():
        theirs = model(torch.from_numpy(random_tokens(1, 24)).long()).logits.numpy()
    np.testing.assert_allclose(forward(policy.config, policy.params), theirs, atol=1e-4)


def some_specs(config: ModelConfig, **head) -> dict:
    """A few weights of each kind: the draw of each is compiled, which takes long on a CPU."""
    specs = weight_specs(config, **head)
    layers = {name: specs["layers"][name] for name in ("attention_norm", "query", "gate")}
    return {"embed": specs["embed"], "layers": layers, "norm": specs["norm"]}


def test_initial_values_do_not_depend_on_the_mesh_or_on_other_weights():
    specs, key = some_specs(tiny_config("qwen2"), head="lm"), jax.random.key(3)
    params = init_params(specs, key)
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, jax.devices()[:8])
    spread = init_params(specs, key, mesh)
    for leaf, there in zip(jax.tree.leaves(params), jax.tree.leaves(spread)):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(there))
    gate = spread["layers"]["gate"]["kernel"]
    assert gate.addressable_shards[0].data.size * 8 == gate.size

    value = weight_specs(tiny_config("qwen3", tie_word_embeddings=False), head="value")
    alone = init_params({"score": value["score"], "gate": value["layers"]["gate"]}, key)
    np.testing.assert_array_equal(alone["gate"]["kernel"], params["layers"]["gate"]["kernel"])


def test_initial_values_have_the_spread_of_the_config_and_differ():
    specs = weight_specs(tiny_config("qwen2"), head="lm")
    layers = specs["layers"]
    chosen = {"gate": layers["gate"], "up": layers["up"], "query": layers["query"], "norm": specs["norm"]}
    params = init_params(chosen, jax.random.key(0))
    gate, up = params["gate"]["kernel"], params["up"]["kernel"]
    for weight in (gate, up, params["query"]["kernel"]):
        assert abs(float(weight.std()) - SIZES["initializer_range"]) < 0.03
        assert weight.dtype == np.float32
    assert not np.array_equal(gate, up)
    assert not np.array_equal(gate[0], gate[1])
    assert np.all(np.asarray(params["norm"]) == 1)
    assert not np.any(np.asarray(params["query"]["bias"]))
    again = init_params({"gate": layers["gate"]}, jax.random.key(1))
    assert not np.array_equal(again["gate"]["kernel"], gate)
