"""Each way in which a checkpoint can be wrong is an error that names the file and the tensor."""

import json
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers as tr
from safetensors.numpy import load_file, save_file

from vcppo_jax.models import hf

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A policy (untied), the same in shards, and a tied one."""
    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(tr.LlamaConfig(**SIZES))
    model.save_pretrained(root / "one")
    model.save_pretrained(root / "many", max_shard_size="4KB")
    tied = tr.AutoModelForCausalLM.from_config(tr.LlamaConfig(**SIZES, tie_word_embeddings=True))
    tied.save_pretrained(root / "tied")
    return root


@pytest.fixture
def copy(saved, tmp_path):
    """copy(name) -> a copy of a saved checkpoint that the test may damage."""
    return lambda name: shutil.copytree(saved / name, tmp_path / name)


def edit(folder, change):
    """Apply `change` to the dict of tensors in model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder, match, load=hf.load_policy):
    with pytest.raises(hf.CheckpointError, match=match) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value).replace(str(folder), "")) < 400


def test_no_directory(tmp_path):
    refused(tmp_path / "absent", "absent does not exist; expected a Hugging Face directory")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "file is not a directory")
    refused(tmp_path, r"no config\.json")


def test_no_safetensors(copy):
    folder = copy("one")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    refused(
        folder, r"found model-00001-of-00002\.safetensors, but neither .*index\.json; copy the missing file"
    )
    (folder / "model-00001-of-00002.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"only PyTorch files \(pytorch_model\.bin\).*save_pretrained")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "found no weights")


def test_missing_shard(copy):
    folder = copy("many")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = index["model.norm.weight"]
    (folder / file).unlink()
    refused(folder, rf"missing shard {file} \(1 of \d+ files\), which holds .*copy or download it again")


def test_damaged_file(copy):
    folder = copy("one")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(folder, r"model\.safetensors: not a complete safetensors file")


def test_index_and_files_disagree(copy):
    folder = copy("many")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    place = index["weight_map"].pop("model.norm.weight")
    file.write_text(json.dumps(index))
    refused(folder, rf"{place}: left-over tensor model\.norm\.weight, which model\.safetensors\.index\.json")
    index["weight_map"] |= {"model.norm.weight": place, "model.norm.bias": place}
    file.write_text(json.dumps(index))
    refused(folder, rf"{place}: missing tensor model\.norm\.bias")
    file.write_text("{}")
    refused(folder, r"index\.json: expected a 'weight_map'")
    file.write_text("{\n,}")
    refused(folder, r"index\.json:2: not valid JSON")


def test_missing_tensor(copy):
    folder = copy("one")
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(
        folder, r"missing tensor model\.layers\.1\.mlp\.up_proj\.weight \(the first of shape \[24, 16\]\)"
    )


def test_left_over_tensor(copy):
    folder = copy("one")
    edit(folder, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": np.ones((24, 16))}))
    refused(
        folder, r"left-over tensor model\.layers\.2\.mlp\.up_proj\.weight \(the first in model\.safetensors\)"
    )


def test_wrong_shape(copy):
    folder = copy("one")
    name = "model.layers.0.self_attn.k_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].T}))
    refused(folder, rf"model\.safetensors: tensor {name} has shape \[16, 8\], expected \[8, 16\] from config")


def test_wrong_dtype(copy):
    folder = copy("one")
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(16, np.int8)}))
    refused(folder, r"tensor model\.norm\.weight has dtype I8, expected one of F32, BF16, F16; a quantised")


def test_untied_without_a_head(copy):
    folder = copy("one")
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, r"missing tensor lm_head\.weight")
    assert hf.load_value_model(folder)[1].loaded is False  # a value model needs none


def test_harmless_left_overs(copy):
    folder = copy("tied")
    plain = hf.load_policy(folder)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    edit(folder, change)
    for leaf, there in zip(jax.tree.leaves(plain), jax.tree.leaves(hf.load_policy(folder)), strict=True):
        np.testing.assert_array_equal(leaf, there)
    edit(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((31, 15), 5.0))
    refused(folder, r"lm_head\.weight differs from model\.embed_tokens\.weight, but config\.json ties them")


@pytest.mark.parametrize("head", ["score", "v_head.summary", "v_head", "value_head"])
@pytest.mark.parametrize("bias", [False, True])
def test_value_head_names(copy, head, bias):
    folder = copy("one")
    weight = np.arange(16, dtype=np.float32).reshape(1, 16)

    def change(tensors):
        tensors[f"{head}.weight"] = weight
        if bias:
            tensors[f"{head}.bias"] = np.full(1, 3.0, np.float32)

    edit(folder, change)
    value_model, info = hf.load_value_model(folder)
    assert info == hf.HeadInfo(loaded=True, tensor=f"{head}.weight", bias=bias)
    assert str(info) == f"loaded from {head}.weight ({'with' if bias else 'without'} bias)"
    found = jax.tree.leaves(value_model.params["score"])
    assert sorted(leaf.size for leaf in found) == ([1, 16] if bias else [16])
    np.testing.assert_array_equal(max(found, key=lambda leaf: leaf.size).ravel(), weight.ravel())
    refused(folder, rf"left-over tensor {head}")  # no policy


def test_value_heads_that_are_refused(copy):
    folder = copy("one")
    edit(folder, lambda tensors: tensors.update({"score.weight": np.ones((5, 16), np.float32)}))
    refused(
        folder,
        r"score\.weight has shape \[5, 16\], which is 5 labels; .*expected \[1, 16\]",
        hf.load_value_model,
    )
    edit(folder, lambda tensors: tensors.update({"v_head.weight": np.ones((1, 16), np.float32)}))
    refused(folder, r"one value head, found score\.weight and v_head\.weight", hf.load_value_model)
    edit(folder, lambda tensors: (tensors.pop("score.weight"), tensors.pop("v_head.weight")))
    edit(folder, lambda tensors: tensors.update({"v_head.bias": np.ones(1, np.float32)}))
    refused(folder, r"left-over tensor v_head\.bias", hf.load_value_model)
