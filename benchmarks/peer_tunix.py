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
from common import (
    ADAMW,
    CLIP,
    GAMMA,
    LAMBDA,
    MAX_GRAD_NORM,
    PAD,
    VALUE_CLIP,
    Answer,
    Stages,
    mini_batch_order,
    rewards_of,
)
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig, RematConfig
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl import algo_core, common
from tunix.rl.ppo.ppo_learner import PPOConfig, TrainExample
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

EOS = -1
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


class Numbers:
    """A tokenizer for Tunix, whose text is the ids."""

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # Tunix then puts none in front

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return PAD


class Updates:
    """Tunix's trainers for its PPO, of both networks; micro-batches are `TrainExample`s."""

    def __init__(self, actor: nnx.Module, critic: nnx.Module, micro_batches: int) -> None:
        """`micro_batches`: of how many the gradients add up to one update."""
        ppo = PPOConfig(epsilon=CLIP, beta=0.0)
        self._micro_batches = micro_batches
        self._models = {"actor": actor, "critic": critic}
        self._trainers = {
            "actor": self._trainer(actor, algo_core.ppo_policy_loss_fn, {"algo_config": ppo}),
            "critic": self._trainer(critic, algo_core.ppo_value_loss_fn, {"clip_range_value": VALUE_CLIP}),
        }

    def _trainer(self, model: nnx.Module, loss: Callable[..., Any], more: dict[str, Any]) -> Trainer:
        adamw = optax.adamw(
            ADAMW["learning_rate"],
            b1=ADAMW["beta1"],
            b2=ADAMW["beta2"],
            eps=ADAMW["eps"],
            weight_decay=ADAMW["weight_decay"],
        )
        trainer = Trainer(
            model,
            optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), adamw),
            TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=self._micro_batches),
            custom_checkpoint_metadata_fn=dict,
        )
        trainer.is_managed_externally = True
        trainer.with_loss_fn(loss, has_aux=True)
        ids = {"pad_id": PAD, "eos_id": EOS}
        trainer.with_gen_model_input_fn(lambda example: {"train_example": example} | more | ids)
        return trainer

    def step(self, name: str, examples: list[TrainExample]) -> tuple[float, float]:
        """One update of a network; (loss, mean of the micro-batches' gradient norms)."""
        assert len(examples) == self._micro_batches
        trainer = self._trainers[name]
        trainer.train(examples)
        jax.block_until_ready(nnx.state(self._models[name]))
        metrics = trainer._prev_buffered_train_metrics
        norms, mean = metrics.additional_metrics["grad_norm"]
        return float(metrics.loss), float(mean([np.asarray(x) for x in norms]))


def make_trainers(
    path: str | Path, data: dict[str, np.ndarray], *, micro_batch: int, remat: str
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
    updates = Updates(actor, critic, len(examples))
    return {name: lambda n=name: updates.step(n, examples) for name in ("actor", "critic")}


class PPO:
    """An iteration as Tunix's `PPOLearner` makes it: whole batches, everything padded to the limit."""

    def __init__(self, path: str, work: Answer) -> None:
        self._work, remat = work, REMAT[work["remat"]]
        self._actor = load_llama(path, remat_config=remat)
        self._critic = Critic(load_llama(path, remat_config=remat))
        self._updates = Updates(self._actor, self._critic, work["mini_batch"] // work["micro_batch"])
        shape = {
            name: getattr(self._actor.config, name) for name in ("num_layers", "num_kv_heads", "head_dim")
        }
        size = work["prompt_tokens"] + work["cap"]
        self._rollout = VanillaRollout(self._actor, Numbers(), CacheConfig(cache_size=size, **shape))

    def _generate(self, prompts: list[list[int]], seed: int) -> list[np.ndarray]:
        """The responses, with the EOS that Tunix leaves out."""
        work, made = self._work, []
        config = RolloutConfig(
            max_tokens_to_generate=work["cap"],
            max_prompt_length=work["prompt_tokens"],
            temperature=1.0,
            top_p=1.0,
            seed=seed,
            eos_tokens=[work["eos"]],
            return_logprobs=True,
        )
        for start in range(0, len(prompts), work["batch"]):
            texts = [" ".join(map(str, prompt)) for prompt in prompts[start : start + work["batch"]]]
            for tokens in self._rollout.generate(texts, config).tokens:
                full = np.append(np.asarray(tokens, np.int32), np.int32(work["eos"]))
                made.append(full[: work["cap"]])
        return made

    def _values(self, rows: dict[str, jax.Array]) -> jax.Array:
        scores = common.compute_score(self._critic, rows["prompts"], rows["responses"], PAD, EOS)
        return scores[:, -self._work["cap"] - 1 : -1] * rows["mask"]

    def iterate(self, prompts: list[list[int]], seed: int, stage: Stages) -> Answer:
        """What iteration.py wants to know of an iteration."""
        work, count = self._work, len(prompts)
        with stage("generate"):
            made = self._generate(prompts, seed)
        lengths = np.asarray([len(response) for response in made])
        padded = np.stack([np.pad(response, (0, work["cap"] - len(response))) for response in made])
        fields = {"prompts": jnp.asarray(prompts, jnp.int32), "responses": jnp.asarray(padded)}
        fields["mask"] = fields["responses"] != PAD

        def micro_batch(rows: Any) -> dict[str, jax.Array]:
            return {name: x[rows] for name, x in fields.items()}

        parts = np.arange(count).reshape(-1, work["micro_batch"])
        with stage("old_log_prob"):
            logps = [
                self._rollout.get_per_token_logps(fields["prompts"][rows], fields["responses"][rows])
                for rows in parts
            ]
            fields["old_logprobs"] = jax.block_until_ready(jnp.concatenate(logps))
        with stage("values"):
            values = [self._values(micro_batch(rows)) for rows in parts]
            fields["old_values"] = jax.block_until_ready(jnp.concatenate(values))
        with stage("adv"):
            rewards = jnp.zeros((count, work["cap"])).at[np.arange(count), lengths - 1].add(rewards_of(count))
            fields["advantages"], fields["returns"] = jax.block_until_ready(
                algo_core.compute_gae_advantages(rewards, fields["old_values"], fields["mask"], GAMMA, LAMBDA)
            )
        losses: dict[str, list[float]] = {"critic": [], "actor": []}
        mini_batches = mini_batch_order(count).reshape(
            -1, work["mini_batch"] // work["micro_batch"], work["micro_batch"]
        )
        for name, found in losses.items():
            with stage(f"update_{name}"):
                for rows_of_parts in mini_batches:
                    examples = [self._example(micro_batch(rows)) for rows in rows_of_parts]
                    found.append(self._updates.step(name, examples)[0])
        with stage("generate"):  # the next one needs the weights
            self._rollout.update_params(nnx.state(self._actor, nnx.Param), (nnx.Param,))
        positions = count * (work["prompt_tokens"] + work["cap"])
        return {"lengths": lengths.tolist(), "losses": losses, "positions": positions}

    def _example(self, rows: dict[str, jax.Array]) -> TrainExample:
        return TrainExample(
            prompt_ids=rows["prompts"],
            prompt_mask=jnp.ones_like(rows["prompts"]),
            completion_ids=rows["responses"],
            completion_mask=rows["mask"],
            ref_per_token_logps=None,
            advantages=rows["advantages"],
            returns=rows["returns"],
            old_values=rows["old_values"],
            old_per_token_logps=rows["old_logprobs"],
        )


def make_iteration(path: str, work: Answer) -> Callable[[list[list[int]], int, Stages], Answer]:
    """From (prompts, seed, stages) to what iteration.py wants to know of an iteration."""
    return PPO(path, work).iterate
