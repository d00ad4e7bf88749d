"""What each network is trained on: functions of (parameters, micro-batch), built from frozen settings.

Every micro-batch comes with `fields["weights"]`, the weight of each token in the loss, and
`fields["token_mean"]`, the weights of plain means over tokens; both count the whole mini-batch.
"""

from __future__ import annotations

import dataclasses

import jax

from vcppo_jax.algos.losses import kl_penalty, policy_loss, value_loss, weighted_sum
from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.decoder import hidden_states
from vcppo_jax.models.heads import token_logprobs, token_values
from vcppo_jax.train.updates import Info, Params
from vcppo_jax.types import PackedBatch


def packed_logprobs(
    params: Params, config: ModelConfig, batch: PackedBatch, *, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of each target, entropy), [R, L]: the one path of actor, old and reference log-probs."""
    hidden = hidden_states(
        params, config, batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids
    )
    return token_logprobs(params, config, hidden, batch.targets, temperature=temperature)


def packed_values(params: Params, config: ModelConfig, batch: PackedBatch) -> jax.Array:
    """The value of the state before each target, [R, L]."""
    hidden = hidden_states(
        params, config, batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids
    )
    return token_values(params, hidden)


@dataclasses.dataclass(frozen=True)
class LogprobScore:
    """`score_tokens`' function for log-probs."""

    config: ModelConfig
    temperature: float

    def __call__(self, params: Params, batch: PackedBatch) -> jax.Array:
        """[R, L] log-probs of the targets."""
        return packed_logprobs(params, self.config, batch, temperature=self.temperature)[0]


@dataclasses.dataclass(frozen=True)
class ValueScore:
    """`score_tokens`' function for values."""

    config: ModelConfig

    def __call__(self, params: Params, batch: PackedBatch) -> jax.Array:
        """[R, L] values of the states before the targets."""
        return packed_values(params, self.config, batch)


@dataclasses.dataclass(frozen=True)
class PolicyObjective:
    """PPO's clipped objective, with a KL loss and an entropy bonus where their weights are not 0."""

    config: ModelConfig
    temperature: float
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_loss_coef: float
    kl_kind: str
    entropy_coef: float

    def __call__(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, Info]:
        """(loss, info) of one micro-batch; reads old_logprobs, advantages and, for the KL, ref_logprobs."""
        fields = batch.fields
        weights, token_mean = fields["weights"], fields["token_mean"]
        logprobs, entropy = packed_logprobs(params, self.config, batch, temperature=self.temperature)
        loss, info = policy_loss(
            logprobs,
            fields["old_logprobs"],
            fields["advantages"],
            batch.mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            weights=weights,
            info_weights=token_mean,
        )
        info = info | {"pg_loss": loss, "entropy": weighted_sum(entropy, token_mean)}
        if self.entropy_coef:
            loss = loss - self.entropy_coef * weighted_sum(entropy, weights)
        if self.kl_loss_coef:
            kl = kl_penalty(logprobs, fields["ref_logprobs"], kind=self.kl_kind, mask=batch.mask)
            loss = loss + self.kl_loss_coef * weighted_sum(kl, weights)
            info = info | {"kl_loss": weighted_sum(kl, token_mean)}
        return loss, info


@dataclasses.dataclass(frozen=True)
class ValueObjective:
    """Half the squared error to the returns, clipped around the old values if asked."""

    config: ModelConfig
    clip: float | None

    def __call__(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, Info]:
        """(loss, info) of one micro-batch; reads returns and old_values."""
        loss, info = value_loss(
            packed_values(params, self.config, batch),
            batch.fields["old_values"],
            batch.fields["returns"],
            batch.mask,
            clip=self.clip,
            weights=batch.fields["weights"],
            info_weights=batch.fields["token_mean"],
        )
        return loss, info | {"vf_loss": loss}


@dataclasses.dataclass(frozen=True)
class SFTObjective:
    """Negative log-likelihood of demonstrations."""

    config: ModelConfig

    def __call__(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, Info]:
        """(loss, info) of one micro-batch."""
        logprobs, entropy = packed_logprobs(params, self.config, batch, temperature=1.0)
        loss = weighted_sum(-logprobs, batch.fields["weights"])
        return loss, {"entropy": weighted_sum(entropy, batch.fields["token_mean"])}
