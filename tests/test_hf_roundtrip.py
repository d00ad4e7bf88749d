"""Tiny random transformers checkpoints: loaded, compared, exported, and loaded by transformers again."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as tr

from vcppo_jax.models import hf
from vcppo_jax.models.decoder import hidden_states
from vcppo_jax.models.heads import logits
from vcppo_jax.models.hf_files import CheckpointFiles
from vcppo_jax.models.networks import values
from vcppo_jax.sharding import make_mesh

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "llama": lambda: tr.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied": lambda: tr.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3_rope": lambda: tr.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama_biases": lambda: tr.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: tr.Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_tied": lambda: tr.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: tr.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3_biases": lambda: tr.Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
}
TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 40))


def save_model(config, folder, auto=tr.AutoModelForCausalLM, dtype=torch.float32, **kwargs):
    """A transformers model with every parameter random (biases and norms too), saved to `folder`."""
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2).add_(parameter.ndim == 1)
    model = model.to(dtype)
    model.save_pretrained(folder, **kwargs)
    return model


def torch_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.float().numpy()


def policy_logits(policy):
    hidden = hidden_states(policy.params, policy.config, jnp.asarray(TOKENS, jnp.int32))
    return np.asarray(logits(policy.params, policy.config, hidden))


def assert_same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for leaf, there in zip(jax.tree.leaves(tree), jax.tree.leaves(other)):
        assert leaf.dtype == there.dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(there))


@pytest.mark.parametrize("case", CASES)
def test_load_export_load(case, tmp_path):
    model = save_model(CASES[case](), tmp_path / "in")
    policy = hf.load_policy(tmp_path / "in")
    np.testing.assert_allclose(policy_logits(policy), torch_logits(model), atol=1e-4)

    out = hf.export_policy(policy, tmp_path / "out", source_dir=tmp_path / "in")
    again = tr.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert type(again) is type(model)
    ours, theirs = again.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    np.testing.assert_allclose(torch_logits(again), torch_logits(model), atol=1e-6)


@pytest.mark.parametrize("case", ["llama3_rope", "qwen2_tied", "qwen3_biases"])
def test_export_without_source_makes_the_same_model(case, tmp_path):
    model = save_model(CASES[case](), tmp_path / "in")
    policy = hf.load_policy(tmp_path / "in")
    out = hf.export_policy(policy, tmp_path / "out", source_dir=None)
    again = tr.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    np.testing.assert_allclose(torch_logits(again), torch_logits(model), atol=1e-6)
    assert hf.load_policy(out).config == policy.config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_become_float32_masters(dtype, tmp_path):
    save_model(CASES["qwen2"](), tmp_path, dtype=dtype)
    model = tr.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    policy = hf.load_policy(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(policy.params)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(policy_logits(policy), torch_logits(model), atol=1e-4)
    kept = hf.load_policy(tmp_path, param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(kept.params)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("case", ["llama_biases", "qwen3"])
def test_sharded_files_onto_a_mesh_equal_the_plain_load(case, tmp_path):
    config = CASES[case]()
    save_model(config, tmp_path / "one")
    save_model(config, tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, jax.devices()[:8])
    plain = hf.load_policy(tmp_path / "one")
    spread = hf.load_policy(tmp_path / "many", mesh=mesh)
    assert_same(plain.params, spread.params)
    split = [leaf for leaf in jax.tree.leaves(spread.params) if not leaf.sharding.is_fully_replicated]
    assert len(split) > len(jax.tree.leaves(plain.params)) // 2
    assert all(leaf.addressable_shards[0].data.size < leaf.size for leaf in split)

    out = hf.export_policy(spread, tmp_path / "out", source_dir=tmp_path / "one", max_shard_bytes=20_000)
    assert (out / "model.safetensors.index.json").is_file()
    assert_same(hf.load_policy(out).params, plain.params)
    assert tr.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32) is not None


def test_replicas_read_each_shard_once(tmp_path, monkeypatch):
    save_model(CASES["llama"](), tmp_path)
    count = {}
    read = CheckpointFiles.read

    def counting(self, name, index):
        key = (name, str(index))
        count[key] = count.get(key, 0) + 1
        return read(self, name, index)

    monkeypatch.setattr(CheckpointFiles, "read", counting)
    hf.load_policy(tmp_path, mesh=make_mesh({"data": 4, "tensor": 2}, jax.devices()[:8]))
    assert set(count.values()) == {1}
    slices = [index for name, index in count if name == "model.layers.0.mlp.gate_proj.weight"]
    assert sorted(slices) == [
        "(slice(0, 24, None), slice(0, 32, None))",
        "(slice(24, 48, None), slice(0, 32, None))",
    ]


def test_bfloat16_export_is_rounded_to_nearest(tmp_path):
    model = save_model(CASES["qwen2_tied"](), tmp_path / "in")
    policy = hf.load_policy(tmp_path / "in")
    out = hf.export_policy(policy, tmp_path / "out", source_dir=tmp_path / "in", dtype="bfloat16")
    again = tr.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert again.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16()), name


def test_export_copies_tokenizer_and_drops_quantization(tmp_path):
    save_model(CASES["llama"](), tmp_path / "in")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "notes.txt"):
        (tmp_path / "in" / name).write_text(json.dumps({"name": name}))
    file = tmp_path / "in" / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {}, "torch_dtype": "float16"})
    )
    out = hf.export_policy(hf.load_policy(tmp_path / "in"), tmp_path / "out", source_dir=tmp_path / "in")
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "model.safetensors"),
        *("tokenizer.json", "chat_template.jinja", "generation_config.json"),
    }
    assert (out / "chat_template.jinja").read_text() == '{"name": "chat_template.jinja"}'
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == config["dtype"] == "float32"
    assert config["initializer_range"] == SIZES["initializer_range"]
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    assert not list(tmp_path.glob(".out*"))


def test_export_refuses(tmp_path):
    save_model(CASES["llama"](), tmp_path / "in")
    save_model(CASES["qwen2"](), tmp_path / "other")
    policy = hf.load_policy(tmp_path / "in")
    with pytest.raises(ValueError, match=r"in exists and is not an empty directory"):
        hf.export_policy(policy, tmp_path / "in", source_dir=tmp_path / "in")
    with pytest.raises(ValueError, match=r"other/config\.json: .* model: family is 'qwen2', .*'llama'"):
        hf.export_policy(policy, tmp_path / "out", source_dir=tmp_path / "other")
    with pytest.raises(ValueError, match=r"dtype is one of .*'int8'"):
        hf.export_policy(policy, tmp_path / "out", source_dir=tmp_path / "in", dtype="int8")
    assert not (tmp_path / "out").exists()


VALUE_CLASSES = {
    "token": tr.AutoModelForTokenClassification,
    "sequence": tr.AutoModelForSequenceClassification,
}


@pytest.mark.parametrize("kind", VALUE_CLASSES)
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_classifiers_are_value_models_and_back(kind, case, tmp_path):
    config = CASES[case]()
    config.num_labels, config.pad_token_id = 1, 0
    model = save_model(config, tmp_path / "in", VALUE_CLASSES[kind])
    value_model, info = hf.load_value_model(tmp_path / "in")
    assert info == hf.HeadInfo(loaded=True, tensor="score.weight", bias=kind == "token")
    tokens = TOKENS % (SIZES["vocab_size"] - 1) + 1  # no padding token, at which the classifier would stop

    def torch_values(torch_model):
        with torch.no_grad():
            return torch_model(torch.from_numpy(tokens)).logits[..., 0].numpy()

    ours = np.asarray(values(value_model, jnp.asarray(tokens, jnp.int32)))
    ours = ours if kind == "token" else ours[:, -1]
    np.testing.assert_allclose(ours, torch_values(model), atol=1e-4)

    out = hf.export_value_model(value_model, tmp_path / "out", source_dir=tmp_path / "in", kind=kind)
    again = VALUE_CLASSES[kind].from_pretrained(out, dtype=torch.float32).eval()
    assert again.config.num_labels == 1
    np.testing.assert_allclose(torch_values(again), torch_values(model), atol=1e-6)
    assert_same(hf.load_value_model(out)[0].params, value_model.params)


def test_value_model_from_a_policy_has_a_new_head(tmp_path):
    save_model(CASES["llama"](), tmp_path / "in")
    policy = hf.load_policy(tmp_path / "in")
    value_model, info = hf.load_value_model(tmp_path / "in")
    assert info == hf.HeadInfo(loaded=False, tensor=None, bias=False)
    assert str(info) == "new (without bias)"
    backbone = {name: leaf for name, leaf in value_model.params.items() if name != "score"}
    assert_same(backbone, {name: policy.params[name] for name in backbone})
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, jax.devices()[:8])
    spread, info = hf.load_value_model(tmp_path / "in", mesh=mesh, head_bias=True)
    assert info.bias
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(spread.params))
    with pytest.raises(ValueError, match="no head bias"):
        hf.export_value_model(spread, tmp_path / "out", source_dir=tmp_path / "in", kind="sequence")
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(value_model.params["score"]))
    kernel = jax.random.normal(jax.random.key(0), (SIZES["hidden_size"], 1))
    value_model = value_model.replace(params={**value_model.params, "score": {"kernel": kernel}})
    # A head without bias gets the zero bias that the token classifier has.
    out = hf.export_value_model(value_model, tmp_path / "out", source_dir=tmp_path / "in")
    again, info = hf.load_value_model(out)
    assert info.loaded
    assert info.bias
    tokens = jnp.asarray(TOKENS, jnp.int32)
    np.testing.assert_array_equal(values(again, tokens), values(value_model, tokens))
