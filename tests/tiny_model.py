"""Makes the files of the tiny model that the package ships: `python tests/tiny_model.py` writes them.

`test_data_tokenizer.py` compares what stands in the package with what this makes. The tokenizer is of
Qwen2's class and rules (byte-level BPE, every digit a token of its own) over a vocabulary of 312: the 256
bytes, so that any text survives encoding and decoding, the few merges that make the built-in task's
prompts short, and added tokens: the tags, and a token per `+d` and `=d`, so that a step of the chain
`+3=3+1=4` takes two tokens, as far apart as the digits of the prompt `3 1`.
"""

from __future__ import annotations

import json
from pathlib import Path

import vcppo_jax.data

TINY_DIR = Path(vcppo_jax.data.__file__).parent / "assets" / "tiny"
WORDS = ["user", "assistant", "Digit", " sum", " modulo", " ten", ":\n", "\n\n", "  "]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_TOKENS = ["<think>", "</think>", "\\boxed{", *(sign + digit for sign in "+=" for digit in "0123456789")]
# Qwen2's pre-tokenizer: letters in words, each digit alone, punctuation with the newlines after it.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE files (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    return table | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token -> id of bytes and merges, and the merges: each word grows from its first byte."""
    characters = byte_characters()
    tokens = sorted(characters.values())
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        letters = [characters[byte] for byte in word.encode()]
        for end in range(1, len(letters)):
            merges.append(("".join(letters[:end]), letters[end]))
            tokens.append("".join(letters[: end + 1]))
    return {token: index for index, token in enumerate(tokens)}, merges


def added_tokens(first_id: int) -> list[dict]:
    """The tags, in the form of tokenizer.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    contents = [(token, True) for token in SPECIAL_TOKENS] + [(token, False) for token in PLAIN_TOKENS]
    return [
        {"id": first_id + rank, "content": content, **flags, "special": special}
        for rank, (content, special) in enumerate(contents)
    ]


def tokenizer_json() -> dict:
    """tokenizer.json, as the tokenizers library reads it."""
    vocab, merges = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(len(vocab)),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }


def files() -> dict[str, str]:
    """File name -> text of everything in assets/tiny."""
    tokenizer = tokenizer_json()
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    flags = [{k: v for k, v in token.items() if k != "id"} for token in tokenizer["added_tokens"]]
    pad, eos = ids["<|endoftext|>"], ids["<|im_end|>"]
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": {str(ids[token["content"]]): token for token in flags},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": max(ids.values()) + 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.1,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "float32",
    }
    generation_config = {"do_sample": True, "eos_token_id": [eos, pad], "pad_token_id": pad}
    contents = {
        "config.json": config,
        "generation_config.json": generation_config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    return {
        name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in contents.items()
    }


if __name__ == "__main__":
    TINY_DIR.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (TINY_DIR / name).write_text(text, encoding="utf-8")
