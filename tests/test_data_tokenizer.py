"""The shipped tokenizer, chat templates, decoding, EOS ids."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, PreTrainedTokenizerFast

from vcppo_jax.data.tasks import digit_sum, solution
from vcppo_jax.data.tokenizer import (
    builtin_model_dir,
    decode,
    encode_chat,
    encode_rendered,
    encode_response,
    eos_ids,
    load_tokenizer,
    pad_id,
    render_chat,
    stop_finder,
)


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer(builtin_model_dir("tiny"))


def llama_like(chat_template=None):
    """A tokenizer that puts BOS before and EOS after every text, as some Llama files do."""
    backend = Tokenizer.from_file(str(tiny_model.TINY_DIR / "tokenizer.json"))
    bos, eos = "<|endoftext|>", "<|im_end|>"
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(t, backend.token_to_id(t)) for t in (bos, eos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, chat_template=chat_template
    )


def test_the_shipped_files_are_what_the_script_makes():
    shipped = {file.name: file.read_text(encoding="utf-8") for file in tiny_model.TINY_DIR.iterdir()}
    assert shipped == tiny_model.files()


def test_the_tiny_model_is_consistent(tiny):
    config = AutoConfig.from_pretrained(tiny_model.TINY_DIR)
    assert config.vocab_size == len(tiny) == 312
    assert type(tiny).__name__.startswith("Qwen2Tokenizer")
    assert tiny.is_fast
    assert tiny.eos_token == "<|im_end|>"
    assert pad_id(tiny) == tiny.convert_tokens_to_ids("<|endoftext|>")
    assert eos_ids(tiny_model.TINY_DIR, tiny) == tuple(sorted([tiny.eos_token_id, pad_id(tiny)]))
    with pytest.raises(ValueError, match="builtin model 'huge': expected one of tiny"):
        builtin_model_dir("huge")


@pytest.mark.parametrize(
    "text",
    [
        "a b  c\n\n\td\r\n",
        "it's 12,345 + 6=7 \\frac{1}{2} \\boxed{3}",
        "日本 é 🙂 \x00\x7f",
        "<think>x</think>",
        "",
    ],
)
def test_any_text_survives(tiny, text):
    ids = tiny(text, add_special_tokens=False)["input_ids"]
    assert decode(tiny, ids) == text


def test_prompt_and_chain_are_short_and_equally_spaced(tiny):
    prompt = encode_chat(tiny, "Digit sum modulo ten:\n3 1 4 1 5 9 2 6 5 3 5 8")
    response = encode_response(tiny, solution(digit_sum([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])))
    assert (len(prompt), len(response)) == (36, 30)
    pieces = [tiny.decode([i]) for i in prompt + response]
    # Digit k of the prompt and step k of the chain are equally far apart for every k.
    first = pieces.index("3")
    assert pieces[first : first + 5 : 2] == ["3", "1", "4"]
    assert pieces[37:43] == ["+3", "=3", "+1", "=4", "+4", "=8"]


def test_chat_template(tiny):
    user = "<|im_start|>user\nhi<|im_end|>\n"
    assert render_chat(tiny, "hi") == user + "<|im_start|>assistant\n"
    with_system = "<|im_start|>system\nBe brief.<|im_end|>\n" + user + "<|im_start|>assistant\n"
    assert render_chat(tiny, "hi", system_prompt="Be brief.") == with_system
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert render_chat(tiny, messages, system_prompt="Be long.") == with_system
    assert encode_chat(tiny, messages) == tiny(with_system, add_special_tokens=False)["input_ids"]
    assert encode_rendered(tiny, []) == []


def test_never_two_bos():
    template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    tokenizer = llama_like(template)
    ids = encode_chat(tokenizer, "hi")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids
    tokenizer.chat_template = "Q: {{ messages[0]['content'] }}"  # the template alone decides
    assert tokenizer.bos_token_id not in encode_chat(tokenizer, "hi")


def test_without_a_chat_template_the_text_stands_alone():
    tokenizer = llama_like()
    plain = tokenizer("1 + 1 =", add_special_tokens=False)["input_ids"]
    assert encode_chat(tokenizer, "1 + 1 =") == [tokenizer.bos_token_id, *plain]
    assert encode_chat(tokenizer, "<|endoftext|>1 + 1 =") == [tokenizer.bos_token_id, *plain]
    assert render_chat(tokenizer, "b", system_prompt="a") == "a\n\nb"


def test_without_bos_none_is_invented(tiny):
    bare = load_tokenizer(tiny_model.TINY_DIR)
    bare.chat_template = None
    assert encode_chat(bare, "hi") == tiny("hi", add_special_tokens=False)["input_ids"]


def test_a_template_that_refuses(tiny):
    tokenizer = llama_like("{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="the chat template refuses messages of roles user: no system role"):
        render_chat(tokenizer, "hi")


def test_responses_end_with_one_eos(tiny):
    eos = tiny.eos_token_id
    assert encode_response(tiny, "x")[-1:] == [eos]
    assert encode_response(tiny, "x<|im_end|>") == encode_response(tiny, "x")
    assert encode_response(tiny, "") == [eos]


def test_decode_drops_the_end_and_keeps_the_rest(tiny):
    text = "<think>+3=3</think>\\boxed{3}"
    ids = encode_response(tiny, text)
    other = tiny.convert_tokens_to_ids("<|im_start|>")
    assert decode(tiny, [*ids, pad_id(tiny), pad_id(tiny)]) == text
    assert decode(tiny, [*ids, other]) == text + "<|im_start|>"
    assert decode(tiny, [*ids, other], eos_ids=[other]) == text
    assert decode(tiny, [*ids, 100_000]) == text
    assert decode(tiny, jnp.asarray(ids)) == text
    assert decode(tiny, []) == ""


def test_decode_keeps_think_tags_that_are_special():
    tokenizer = llama_like()
    tokenizer.add_special_tokens({"pad_token": "</think>"})
    ids = tokenizer("<think>a</think>b", add_special_tokens=False)["input_ids"]
    assert decode(tokenizer, ids) == "<think>a</think>b"


def test_eos_ids_are_the_union(tiny, tmp_path):
    assert eos_ids(tmp_path, tiny) == (tiny.eos_token_id,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert eos_ids(tmp_path, tiny) == (5, 9, tiny.eos_token_id)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_ids(tmp_path, tiny) == (5, 9, tiny.eos_token_id)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id: expected a whole number or a list"):
        eos_ids(tmp_path, tiny)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON"):
        eos_ids(tmp_path, tiny)


def test_pad_falls_back_to_eos():
    tokenizer = llama_like()
    assert tokenizer.pad_token_id is None
    assert pad_id(tokenizer) == tokenizer.eos_token_id


def test_bad_directories(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a directory with a tokenizer; there is none"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"expected tokenizer\.json or"):
        load_tokenizer(tmp_path)
    shutil.copytree(tiny_model.TINY_DIR, tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="damaged: the tokenizer cannot be read"):
        load_tokenizer(tmp_path / "damaged")
    shutil.copytree(tiny_model.TINY_DIR, tmp_path / "endless")
    config = json.loads((tmp_path / "endless" / "tokenizer_config.json").read_text())
    (tmp_path / "endless" / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))
    with pytest.raises(ValueError, match="endless: the tokenizer names no EOS token"):
        load_tokenizer(tmp_path / "endless")


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (("=7", "never"), "<think>+4=4+3=7"),
        (("</think>\\boxed",), "<think>+4=4+3=7+1=8</think>\\boxed{"),
        (("{8}", "+1"), "<think>+4=4+3=7+1"),
        (("=9",), None),
    ],
)
def test_stop_texts_are_found_wherever_a_look_ends(tiny, stops, kept, chunk):
    ids = np.asarray(encode_response(tiny, "<think>+4=4+3=7+1=8</think>\\boxed{8}"))
    find, end, seen = stop_finder(tiny, stops), None, 0
    while end is None and seen < len(ids):
        now = min(len(ids), seen + chunk)
        end, seen = find(ids[:now], seen), now
    assert (None if end is None else tiny.decode(ids[:end])) == kept
