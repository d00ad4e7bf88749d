"""Tunix's Llama with the weights of a Hugging Face directory, in float32, and its PPO trainers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig, RematConfig
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl import algo_core, common
from tunix.rl.ppo.ppo_learner import PPOConfig, TrainExample
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

PAD, EOS = 0, -1
REMAT = {"none": RematConfig.NONE, "full": RematConfig.DECODER}


def llama_config(path: str | Path, **changes: Any) -> ModelConfig:
    """Tunix's config for config.json in the directory `path`."""
    hf = json.loads((Path(path) / "config.json").read_text())
    return ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=1_000_000,  # Tunix 0.1.7 computes with this one, whatever is said here
        norm_eps=hf["rms_norm_eps"],
        weight_tying=hf["tie_word_embeddings"],
        **changes,
    )


def load_llama(path: str | Path, **changes: Any) -> Llama3:
    """The model; `changes` to its config."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = llama_config(path, **changes)
    return create_model_from_safe_tensors(str(path), config, mesh=mesh, dtype=jnp.float32)


class Critic(nnx.Module):
    """The decoder with a scalar head of zeros; takes the `segment_ids` that Tunix's value loss passes."""

    def __init__(self, llama: Llama3) -> None:
        width = llama.config.embed_dim
        llama.config = dataclasses.replace(llama.config, weight_tying=False)
        zeros = nnx.initializers.zeros_init()
        llama.lm_head = nnx.Linear(width, 1, use_bias=False, kernel_init=zeros, rngs=nnx.Rngs(0))
        self.llama = llama

    def __call__(
        self, tokens: Any, positions: Any, cache: Any, attention_mask: Any, segment_ids: Any = None
    ) -> Any:
        """(values [B, L, 1], cache)."""
        return self.llama(tokens, positions, cache, attention_mask)


def make_trainers(
    path: str | Path,
    data: dict[str, np.ndarray],
    *,
    micro_batch: int,
    remat: str,
    learning_rate: float,
    adamw: dict[str, float],
    max_grad_norm: float,
    clip: float,
    value_clip: float,
) -> dict[str, Callable[[], tuple[float, float]]]:
    """Name of the network -> its update, see update.py."""
    actor = load_llama(path, remat_config=REMAT[remat])
    critic = Critic(load_llama(path, remat_config=REMAT[remat]))
    batches = [
        {name: jnp.asarray(x[start : start + micro_batch]) for name, x in data.items()}
        for start in range(0, len(data["prompts"]), micro_batch)
    ]
    graph, state = nnx.split(actor)
    examples = [
        TrainExample(
            prompt_ids=batch["prompts"],
            prompt_mask=jnp.ones_like(batch["prompts"]),
            completion_ids=batch["responses"],
            completion_mask=jnp.ones_like(batch["responses"]),
            ref_per_token_logps=None,
            advantages=batch["advantages"],
            returns=batch["returns"],
            old_values=batch["old_values"],
            old_per_token_logps=common.compute_per_token_logps(
                graph, state, batch["prompts"], batch["responses"], pad_id=PAD, eos_id=EOS
            ),
        )
        for batch in batches
    ]
    ids = {"pad_id": PAD, "eos_id": EOS}
    ppo = PPOConfig(epsilon=clip, beta=0.0)

    def stepper(model: nnx.Module, loss: Callable[..., Any], more: dict[str, Any]) -> Any:
        trainer = Trainer(
            model,
            optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.adamw(learning_rate, **adamw)),
            TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=len(examples)),
            custom_checkpoint_metadata_fn=dict,
        )
        trainer.is_managed_externally = True
        trainer.with_loss_fn(loss, has_aux=True)
        trainer.with_gen_model_input_fn(lambda example: {"train_example": example} | more | ids)

        def step() -> tuple[float, float]:
            trainer.train(examples)
            jax.block_until_ready(nnx.state(model))
            metrics = trainer._prev_buffered_train_metrics
            norms, mean = metrics.additional_metrics["grad_norm"]
            return float(metrics.loss), float(mean([np.asarray(x) for x in norms]))

        return step

    return {
        "actor": stepper(actor, algo_core.ppo_policy_loss_fn, {"algo_config": ppo}),
        "critic": stepper(critic, algo_core.ppo_value_loss_fn, {"clip_range_value": value_clip}),
    }
