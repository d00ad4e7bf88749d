"""Hugging Face tokenizers: loading, the chat template, decoding, and the ids that end and pad a response.

A prompt is rendered to text by the chat template and then encoded without special tokens, because the
template itself writes them: so there is never a second BOS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
THINK_TAGS = ("<think>", "</think>")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_BUILTIN_DIR = Path(__file__).parent / "assets"


def builtin_model_dir(name: str) -> Path:
    """The Hugging Face directory of a model that the package ships (`tiny`); ValueError for another name."""
    known = sorted(path.name for path in _BUILTIN_DIR.iterdir() if (path / "config.json").is_file())
    if name not in known:
        raise ValueError(f"builtin model {name!r}: expected one of {', '.join(known)}")
    return _BUILTIN_DIR / name


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The fast tokenizer of a local Hugging Face directory. Nothing is downloaded and no code of it is run.

    Raises FileNotFoundError where the directory or its tokenizer is missing, ValueError where it cannot be
    read or has no EOS token.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise FileNotFoundError(f"{path}: expected a directory with a tokenizer; there is none")
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(f"{path}: expected {' or '.join(_TOKENIZER_FILES)} there, found neither")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise bare Exception for a damaged file
        raise ValueError(f"{path}: the tokenizer cannot be read: {_one_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{path}: the tokenizer names no EOS token; set eos_token in tokenizer_config.json")
    return tokenizer


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    *,
    system_prompt: str | None = None,
) -> str:
    """The text that the model continues: the chat template with the opening of the assistant's turn.

    A text prompt is one user message. `system_prompt` comes first unless the messages bring a system message.
    Without a chat template (base models) the contents stand alone, a blank line between them, no role names:
    a lone text prompt is then taken as it is. Raises ValueError where the template refuses the messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if system_prompt is not None and (not messages or messages[0]["role"] != "system"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in messages)
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # jinja2.TemplateError, or whatever the template's own code raises
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template refuses messages of roles {roles}: {_one_line(error)}"
        ) from error
    return str(rendered)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts from `render_chat`, in order.

    With a chat template no special token is added. Without one, BOS is put in front where the tokenizer
    does so and the text does not begin with it; an EOS that the tokenizer would append is left out.
    """
    if len(texts) == 0:
        return []
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    if tokenizer.chat_template is not None or tokenizer.bos_token_id is None:
        return ids
    adds_bos = tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [tokenizer.bos_token_id]
    bos = [tokenizer.bos_token_id]
    return [bos + row if adds_bos and row[:1] != bos else row for row in ids]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    *,
    system_prompt: str | None = None,
) -> list[int]:
    """Token ids of a prompt, from BOS (if any) to the opening of the assistant's turn; see `render_chat`."""
    return encode_rendered(tokenizer, [render_chat(tokenizer, prompt, system_prompt=system_prompt)])[0]


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a response, closed by the tokenizer's EOS exactly once."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def decode(tokenizer: PreTrainedTokenizerBase, ids: npt.ArrayLike, *, eos_ids: Collection[int] = ()) -> str:
    """The text of token ids without EOS and padding.

    `ids` is a list or a one-dimensional array. All else stays, `<think>` tags too, whether or not the
    tokenizer calls them special. `eos_ids` are those that end a response besides the tokenizer's own (see the
    function `eos_ids`). Ids beyond the tokenizer's vocabulary,
    which models with a padded embedding can sample, come out as nothing.
    """
    dropped = {tokenizer.eos_token_id, pad_id(tokenizer), *eos_ids}
    tags = {tokenizer.convert_tokens_to_ids(tag) for tag in THINK_TAGS if tag in tokenizer.get_added_vocab()}
    kept = [i for i in np.asarray(ids, dtype=np.int64).tolist() if i in tags or i not in dropped]
    return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def stop_finder(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> Callable[[np.ndarray, int], int | None]:
    """A function from (ids of a response [t], how many of them were looked at before) to where it ends.

    That is the number of tokens with which one of `texts` first stands in the response, or None.
    """
    # A token may be a single byte: so many from before may belong to a text that the new ones complete.
    overlap = max(len(text.encode()) for text in texts)

    def find(ids: np.ndarray, seen: int) -> int | None:
        first = max(0, seen - overlap)

        def stands(end: int) -> bool:
            text = tokenizer.decode(ids[first:end].tolist(), clean_up_tokenization_spaces=False)
            return any(stop in text for stop in texts)

        if not stands(len(ids)):
            return None
        return next(end for end in range(min(seen, len(ids)) + 1, len(ids) + 1) if stands(end))

    return find


def eos_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end a response, ascending: generation_config.json's, config.json's and the tokenizer's.

    Chat models often end a turn with another token than the tokenizer's EOS, and the three places disagree.
    Raises ValueError where a file cannot be read or an id is no whole number.
    """
    found: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if file.is_file():
            found.update(_eos_in(file))
    if not found:
        raise ValueError(f"{path}: no EOS id in generation_config.json, config.json or the tokenizer")
    return tuple(sorted(found))


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills up rows: the tokenizer's pad token or, where it has none, its EOS token."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def _eos_in(file: Path) -> list[int]:
    """The EOS ids of one JSON file: none, one or a list."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON: {error}") from error
    value = content.get("eos_token_id") if isinstance(content, dict) else None
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise ValueError(f"{file}: eos_token_id: expected a whole number or a list of them, got {value!r}")
    return values


def _one_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
