"""What each network is trained on: functions of (parameters, micro-batch), built from frozen settings.

Every micro-batch comes with `fields["weights"]`, the weight of each token in the loss, and
`fields["token_mean"]`, the weights of plain means over tokens; both count the whole mini-batch.
"""

from __future__ import annotations

import dataclasses

import jax

from vcppo_jax.algos.losses import kl_penalty, value_loss, weighted_sum
from vcppo_jax.algos.policy import POLICY_LOSSES
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
    """The clipped objective, and the terms beside it whose weights are not 0.

    Reads `old_logprobs` and `advantages`, and what the terms need: `importance` (multiplies the clipped
    objective's weights), `ref_logprobs` with `kl_weights`, `positive_weights`, `sft_weights`.
    """

    config: ModelConfig
    temperature: float
    policy_loss: str
    """A key of `POLICY_LOSSES`."""
    clip_low: float
    clip_high: float
    dual_clip: float | None
    importance: bool
    kl_kind: str | None
    """The estimator of the KL loss; None without one. `kl_weights` has the coefficient, which may adapt."""
    entropy_coef: float
    positive_nll_coef: float
    sft_coef: float

    @property
    def fields(self) -> tuple[str, ...]:
        """What it reads of a batch."""
        terms = {
            "importance": self.importance,
            "ref_logprobs": self.kl_kind is not None,
            "kl_weights": self.kl_kind is not None,
            "positive_weights": self.positive_nll_coef > 0,
            "sft_weights": self.sft_coef > 0,
        }
        read = (name for name, used in terms.items() if used)
        return ("weights", "token_mean", "old_logprobs", "advantages", *read)

    def __call__(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, Info]:
        """(loss, info) of one micro-batch."""
        fields = batch.fields
        weights, token_mean = fields["weights"], fields["token_mean"]
        logprobs, entropy = packed_logprobs(params, self.config, batch, temperature=self.temperature)
        loss, info = POLICY_LOSSES[self.policy_loss](
            logprobs,
            fields["old_logprobs"],
            fields["advantages"],
            batch.mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            weights=weights * fields["importance"] if self.importance else weights,
            info_weights=token_mean,
            segment_ids=batch.segment_ids,
        )
        info = info | {"pg_loss": loss, "entropy": weighted_sum(entropy, token_mean)}
        if self.entropy_coef:
            loss = loss - self.entropy_coef * weighted_sum(entropy, weights)
        if self.kl_kind is not None:
            kl = kl_penalty(logprobs, fields["ref_logprobs"], kind=self.kl_kind, mask=batch.mask)
            loss = loss + weighted_sum(kl, fields["kl_weights"])
            info = info | {"kl_loss": weighted_sum(kl, token_mean)}
        if self.positive_nll_coef:
            nll = weighted_sum(-logprobs, fields["positive_weights"])
            loss, info = loss + self.positive_nll_coef * nll, info | {"positive_nll": nll}
        if self.sft_coef:
            nll = weighted_sum(-logprobs, fields["sft_weights"])
            loss, info = loss + self.sft_coef * nll, info | {"sft_loss": nll}
        return loss, info


@dataclasses.dataclass(frozen=True)
class ValueObjective:
    """Half the squared error to the returns, clipped around the old values if asked."""

    config: ModelConfig
    clip: float | None
    fields = ("weights", "token_mean", "returns", "old_values")
    """What it reads of a batch."""

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


@dataclasses.dataclass(frozen=True)
class ScoreObjective:
    """The sum of `score_gradients` times the value at each place; its gradient is that of a loss of scores.

    A loss that compares sequences is no sum over them. Its derivative by each score, taken beforehand at
    these parameters, is a constant here, so the sequences may lie in different micro-batches.
    """

    config: ModelConfig

    def __call__(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, Info]:
        """(sum, no info) of one micro-batch."""
        return weighted_sum(packed_values(params, self.config, batch), batch.fields["score_gradients"]), {}
