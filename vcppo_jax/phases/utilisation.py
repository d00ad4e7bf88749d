"""`perf/mfu`: the share of the devices' peak that a step of RL puts to use."""

from __future__ import annotations

import jax
import numpy as np

from vcppo_jax.aot.chips import chip_of
from vcppo_jax.config import Config
from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.flops import BACKWARD, forward_flops
from vcppo_jax.phases.loop import Metrics


def step_flops(
    config: Config,
    policy: ModelConfig,
    value_model: ModelConfig | None,
    lengths: np.ndarray,
    *,
    has_reference: bool,
    trains_actor: bool,
) -> float:
    """Operations that a step needs for sequences of these lengths (prompts included).

    The policy: sampling and old log-probs, a forward pass each, one more for the reference, and the updates.
    The value model: a forward pass for the values, and its updates.
    """
    update = 1 + BACKWARD
    passes = 2 + has_reference + update * config.actor.epochs * trains_actor
    flops = passes * forward_flops(policy, lengths, head="lm")
    if value_model is not None:
        passes = 1 + update * config.critic.epochs
        flops += passes * forward_flops(value_model, lengths, head="value")
    return flops


def utilisation(config: Config, flops: float, seconds: float) -> Metrics:
    """`perf/mfu` over all devices; nothing where their peak is not known."""
    devices = jax.devices()
    peak = config.logging.peak_tflops
    if peak is None:
        chip = chip_of(devices[0].device_kind)
        if chip is None:
            return {}
        peak = chip.tflops
    return {"perf/mfu": flops / seconds / (peak * 1e12 * len(devices))}
