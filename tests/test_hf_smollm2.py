"""SmolLM2-135M-Instruct: the logits of a real model are as exact as transformers'.

The directory is $VCPPO_SMOLLM2, or is made once with benchmarks/make_smollm2.py and kept in the user's cache.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as tr

from vcppo_jax.models import hf
from vcppo_jax.models.decoder import hidden_states
from vcppo_jax.models.heads import logits

MAKE = Path(__file__).parent.parent / "benchmarks" / "make_smollm2.py"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    given = os.environ.get("VCPPO_SMOLLM2")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "vcppo_jax" / "smollm2-135m-instruct"
    if not folder.is_dir():
        done = subprocess.run([sys.executable, MAKE, folder], capture_output=True, text=True)
        if not folder.is_dir():
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            pytest.skip(f"SmolLM2-135M cannot be had ({reason}); set VCPPO_SMOLLM2 to its directory")
    return folder


def test_logits_are_those_of_transformers_up_to_float32_rounding(smollm2):
    tokenizer = tr.AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is 17 + 25? Think step by step."}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    tokens = np.asarray([tokenizer(text, add_special_tokens=False).input_ids])
    assert tokenizer.decode(tokens[0]) == text
    assert tokenizer.eos_token_id == 2

    model = tr.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
        exact = model.double()(torch.from_numpy(tokens)).logits.numpy()
    del model
    policy = hf.load_policy(smollm2)
    hidden = hidden_states(policy.params, policy.config, jnp.asarray(tokens, jnp.int32))
    ours = np.asarray(logits(policy.params, policy.config, hidden))

    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    # Not a plain 1e-4 between the two: logits reach 38 here, float32 rounding alone puts transformers' own
    # result about 1e-4 from its float64 one, and two float32 results differ by more than either's error.
    their_error, our_error = np.abs(theirs - exact).max(), np.abs(ours - exact).max()
    assert their_error < 2e-4
    assert our_error < 2 * their_error, f"ours {our_error:.2e} from float64, transformers' {their_error:.2e}"
    assert np.abs(ours - theirs).mean() < 1e-4
