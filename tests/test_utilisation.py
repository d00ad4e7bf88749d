"""Operations of a step against a count by hand."""

import dataclasses

import numpy as np
import pytest
from tiny_run import tiny_config

from vcppo_jax.aot.chips import chip_of
from vcppo_jax.models.config import model_config
from vcppo_jax.models.flops import forward_flops
from vcppo_jax.phases.utilisation import step_flops, utilisation

CONFIG = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12 + 2 * 8  # q, k and v, o, mlp, two norms
BODY = 3 * LAYER + 8


def model(**changes):
    return model_config(CONFIG | changes, compute_dtype="float32", remat="none")


@pytest.mark.parametrize("tied", [False, True])
def test_a_forward_pass_is_counted_by_hand(tied):
    config, lengths = model(tie_word_embeddings=tied), np.array([3, 5])
    # Scores and values of the keys up to each position, two operations each: 2 x 2 x 8 x (1 + ... + n), and
    # (1 + ... + n) is n^2 / 2 but for n / 2, which the usual count leaves out.
    attention = 3 * 2 * 8 * (9 + 25)
    assert forward_flops(config, lengths, head="lm") == 2 * (BODY + 8 * 10) * 8 + attention
    assert forward_flops(config, lengths, head="value") == 2 * (BODY + 8) * 8 + attention


def test_a_step_counts_sampling_scoring_and_updates(tmp_path):
    config, lengths = tiny_config(tmp_path, "actor.epochs=2", "critic.epochs=3"), np.array([4])
    policy, value_model = model(), dataclasses.replace(model(), num_layers=1)
    lm = forward_flops(policy, lengths, head="lm")
    value = forward_flops(value_model, lengths, head="value")
    options = {"has_reference": True, "trains_actor": True}
    assert (
        step_flops(config, policy, value_model, lengths, **options) == (3 + 3 * 2) * lm + (1 + 3 * 3) * value
    )
    options = {"has_reference": False, "trains_actor": False}
    assert step_flops(config, policy, None, lengths, **options) == 2 * lm


def test_utilisation_is_over_all_devices_whose_peak_is_known(tmp_path):
    assert utilisation(tiny_config(tmp_path), 1e12, 2.0) == {}  # a CPU
    config = tiny_config(tmp_path, "logging.peak_tflops=0.5")
    assert utilisation(config, 1e12, 2.0) == {"perf/mfu": pytest.approx(1 / 2 / 0.5 / 8)}
    assert chip_of("NVIDIA H100 80GB HBM3").tflops == 989.0
    assert chip_of("TPU v5 lite").tflops == 197.0
    assert chip_of("TPU v5p").tflops == chip_of("TPU v5").tflops == 459.0
    assert chip_of("cpu") is None
