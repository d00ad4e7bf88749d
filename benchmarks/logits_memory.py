"""Peak memory of one actor update at long context, with the vocabulary projection and without it.

    python benchmarks/logits_memory.py [--length 16384] [--layers 28]

Nothing is run: the update of a policy with the shapes of Qwen2.5-7B (vocabulary 152,064; float32 weights and
moments, bfloat16 compute, full remat), one row of `--length` tokens, is compiled for one CPU device, and its
memory is read. Without the projection the loss is a sum over the hidden states; all else is the same.
Peak: arguments + temporaries + results that share no buffer with an argument.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import print_head, print_table, versions

from vcppo_jax.models.config import model_config
from vcppo_jax.models.decoder import hidden_states
from vcppo_jax.models.specs import is_spec, weight_specs
from vcppo_jax.train.objectives import PolicyObjective
from vcppo_jax.train.optimizer import make_optimizer
from vcppo_jax.train.updates import TrainState, update
from vcppo_jax.types import PackedBatch

QWEN2_5_7B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def peak_gib(objective: Any, config: Any, length: int) -> tuple[float, float]:
    """(peak, temporaries alone) of one update in GiB."""
    optimizer = make_optimizer(
        optax.constant_schedule(1e-6), beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0
    )
    specs = weight_specs(config, head="lm")
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, np.float32), specs, is_leaf=is_spec)
    state = TrainState(params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((), np.int32))
    integers = jax.ShapeDtypeStruct((1, 1, length), np.int32)
    numbers = jax.ShapeDtypeStruct((1, 1, length), np.float32)
    fields = dict.fromkeys(("weights", "token_mean", "old_logprobs", "advantages"), numbers)
    batch = PackedBatch(*[integers] * 4, numbers, fields)
    step = jax.jit(functools.partial(update, loss_function=objective, optimizer=optimizer), donate_argnums=0)
    memory = step.lower(state, batch, jax.ShapeDtypeStruct((), np.int32)).compile().memory_analysis()
    temporaries = memory.temp_size_in_bytes
    peak = memory.argument_size_in_bytes + temporaries
    peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return peak / 2**30, temporaries / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=28)
    args = parser.parse_args()
    print_head({"ours": versions("jax", "jaxlib")})
    shapes = QWEN2_5_7B | {"num_hidden_layers": args.layers}
    config = model_config(shapes, compute_dtype="bfloat16", remat="full")
    with_projection = PolicyObjective(
        config=config, temperature=1.0, policy_loss="ppo", clip_low=0.2, clip_high=0.2, dual_clip=None,
        importance=False, kl_kind=None, entropy_coef=0.0, positive_nll_coef=0.0, sft_coef=0.0,
    )  # fmt: skip

    def without_projection(params: Any, batch: PackedBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        states = hidden_states(
            params, config, batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids
        )
        return jnp.sum(batch.fields["weights"] * jnp.sum(states.astype(jnp.float32), -1)), {}

    rows, first = [], None
    for name, objective in (("left out", without_projection), ("in chunks", with_projection)):
        peak, temporaries = peak_gib(objective, config, args.length)
        first = peak if first is None else first
        rows.append((name, f"{peak:.2f}", f"{temporaries:.2f}", f"{peak / first:.3f}"))
    logits = args.length * shapes["vocab_size"] * 4 / 2**30
    print_table(("projection", "peak GiB", "temporaries GiB", "peak, ratio"), rows)
    print(f"[B, T, V] in float32 would be {logits:.1f} GiB, and the backward pass needs it twice.")


if __name__ == "__main__":
    main()
