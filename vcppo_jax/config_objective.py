"""The sections that say what is sampled, rewarded, estimated and optimised: rollout, reward, algorithm.

Every key's one default and explanation stand here, those of the other sections in `config`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
Over = Literal["none", "group", "batch"]


class Section(BaseModel):
    """Base of all sections: immutable, hashable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def refuse_unread(self, section: str, choice: str, readers: dict[str, tuple[str, ...]]) -> None:
        """ValueError for a key that is set to something else than its default and that `choice` never reads.

        `readers` maps a key to the values of the key `choice` under which it is read.
        """
        chosen = getattr(self, choice)
        for key, values in readers.items():
            value: Any = getattr(self, key)
            if value != type(self).model_fields[key].default and chosen not in values:
                raise ValueError(
                    f"{section}.{key}={value} is read with {section}.{choice}={' or '.join(values)} only, "
                    f"and {section}.{choice} is {chosen}: remove one of them"
                )


class RolloutSection(Section):
    """Sampling of responses during value-pretraining and RL."""

    n: Positive = Field(1, description="Samples per prompt.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature, also that of all log-probs.")
    top_k: NonNegative = Field(0, description="Sample from the k likeliest tokens; 0 is off.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Drop tokens below min_p times the likeliest; 0 is off."
    )
    max_new_tokens: Positive = Field(2048, description="Length limit of a response, in tokens.")
    batch_size: Positive = Field(
        256, description="Slots: sequences that decode together; one that ends makes room for the next."
    )
    int8_weights: bool = Field(
        False,
        description="Decode in RL with the layers' matrices rounded to 8 bits, half of what bfloat16 has a "
        "decode step read. Asks for algorithm.importance_correction.",
    )
    stop: tuple[str, ...] = Field(
        (),
        description="Texts that end a response, besides the EOS tokens; the response keeps them. In "
        "evaluation too.",
    )
    token_budget: Positive | None = Field(
        None,
        description="Response tokens of all samples of a rollout together; when they are used up, at the "
        "end of a chunk of 32 decode steps, responses under way are cut and the others stay "
        "empty. null is off.",
    )

    @field_validator("stop")
    @classmethod
    def _stop_texts(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        if not all(texts):
            raise ValueError("expected texts of at least one character")
        return texts


class RewardSection(Section):
    """From a response to its reward, in this order: source, scale, normalize, clip, overlong penalty."""

    source: Literal["verifier", "model"] = Field(
        "verifier",
        description="verifier: +1 for a right answer, else -1. model: the score of the reward model at "
        "reward.model; accuracies are the verifier's still.",
    )
    model: str | None = Field(
        None,
        description="Reward model for reward.source=model: a Hugging Face directory, or the reward phase "
        "of a run (runs/x/reward).",
    )
    scale: Literal["plus_minus_one", "zero_one"] = Field(
        "plus_minus_one",
        description="The verifier's rewards of a right and a wrong answer: 1 and -1, or 1 and 0.",
    )
    normalize: Literal["none", "running", "reward_model"] = Field(
        "none",
        description="running: z-score by mean and standard deviation of all rewards so far, carried from "
        "value-pretraining to RL. reward_model: by those of the reward model's scores at the "
        "end of its training.",
    )
    clip: float | None = Field(
        None, gt=0, description="Rewards are clipped to within this of 0, after normalising; null is off."
    )
    overlong_buffer_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="DAPO's soft punishment: over the last part of rollout.max_new_tokens, of this share, "
        "the reward falls linearly by overlong_penalty; null is off.",
    )
    overlong_penalty: float = Field(
        1.0, gt=0, description="What the longest response loses by the soft punishment."
    )
    overlong_filter: bool = Field(
        False,
        description="Leave responses that the length limit cut out of the policy's loss (their rewards "
        "still count in the statistics of their group, and for the value model).",
    )

    @model_validator(mode="after")
    def _combinations(self) -> RewardSection:
        self.refuse_unread("reward", "source", {"model": ("model",), "scale": ("verifier",)})
        if self.source == "model" and self.model is None:
            raise ValueError("reward.source=model needs reward.model")
        if self.normalize == "reward_model" and self.source != "model":
            raise ValueError("reward.normalize=reward_model needs reward.source=model")
        if self.overlong_buffer_share is None and self.overlong_penalty != 1.0:
            raise ValueError("reward.overlong_penalty needs reward.overlong_buffer_share")
        return self


class AlgorithmSection(Section):
    """What is estimated and what is optimised. The defaults are VC-PPO's."""

    advantage: Literal["gae", "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = Field(
        "gae",
        description="gae uses the value model; the others need none. grpo: a response's reward, minus "
        "score_mean, over score_std. rloo: minus the mean of the prompt's other samples. "
        "reinforce_pp: reward-to-go. reinforce_pp_baseline: the reward minus the mean of the "
        "prompt's samples.",
    )
    score_mean: Over = Field(
        "group",
        description="grpo: subtract no mean, that of the prompt's samples, or that of the whole rollout "
        "batch.",
    )
    score_std: Over = Field(
        "group",
        description="grpo: divide by no standard deviation (Dr. GRPO), the group's, or the batch's (Lite "
        "PPO).",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token (gae, reinforce_pp).")
    lambda_actor: float = Field(0.95, ge=0, le=1, description="GAE lambda of the policy's advantages.")
    length_adaptive_alpha: float | None = Field(
        None,
        gt=0,
        description="VAPO: the policy's lambda is 1 - 1 / (alpha x response length), at least 0, in place "
        "of lambda_actor; null is off.",
    )
    lambda_critic: float = Field(1.0, ge=0, le=1, description="GAE lambda of the value model's targets.")
    whiten_advantages: bool | None = Field(
        None,
        description="Subtract the mean and divide by the standard deviation over all tokens of the "
        "rollout batch. null: yes with gae, reinforce_pp and reinforce_pp_baseline, no with "
        "grpo and rloo.",
    )
    policy_loss: Literal["ppo", "gspo", "cispo"] = Field(
        "ppo",
        description="ppo clips a ratio per token, gspo one per sequence; cispo weighs the log-likelihood "
        "with the clipped ratio and clips no gradient.",
    )
    clip_low: float = Field(
        0.2, gt=0, le=1, description="The ratio is clipped below at 1 - clip_low; 1 is no bound."
    )
    clip_high: float = Field(0.2, gt=0, description="The ratio is clipped above at 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bound of the loss for negative advantages, times |A|; null is off."
    )
    aggregation: Aggregation = Field(
        "token-mean",
        description="How token losses of the policy become one number. The constant length of seq-mean- "
        "token-sum-norm is rollout.max_new_tokens.",
    )
    importance_correction: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Multiply the policy's loss by the ratio of the trainer's to the engine's "
        "probability, of each token or of the whole response, at most importance_cap.",
    )
    importance_cap: float = Field(2.0, gt=0, description="Where that ratio is truncated.")
    value_clip: float | None = Field(
        None, gt=0, description="Clip the new value to within this of the old one; null is off."
    )
    value_aggregation: Aggregation = Field(
        "token-mean", description="How token losses of the value model add up."
    )
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the KL to the policy that RL started from; 0 is off."
    )
    kl_kind: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of the KL per token.")
    kl_in: Literal["reward", "loss", "both"] = Field(
        "loss", description="Whether the KL is a penalty on each token's reward, a loss, or both."
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="Adapt kl_coef after each step so that the mean KL per token comes to this; null "
        "keeps it fixed.",
    )
    kl_horizon: Positive = Field(10_000, description="Samples over which kl_coef adapts.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of an entropy bonus; 0 is off.")
    positive_nll_coef: float = Field(
        0.0,
        ge=0,
        description="VAPO: weight of the negative log-likelihood of right responses, a mean over their "
        "tokens.",
    )
    sft_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the negative log-likelihood of demonstrations (sft.data, or the built-in "
        "task's), mixed into each update of the policy, at rollout.temperature.",
    )
    sft_batch_size: Positive = Field(16, description="Demonstrations per update for sft_coef.")

    @property
    def whitens(self) -> bool:
        """`whiten_advantages`, or what null stands for."""
        if self.whiten_advantages is None:
            return self.advantage in ("gae", "reinforce_pp", "reinforce_pp_baseline")
        return self.whiten_advantages

    @property
    def uses_group(self) -> bool:
        """Whether the samples of a prompt are compared with each other."""
        by_group = self.advantage == "grpo" and "group" in (self.score_mean, self.score_std)
        return by_group or self.advantage in ("rloo", "reinforce_pp_baseline")

    @model_validator(mode="after")
    def _combinations(self) -> AlgorithmSection:
        self.refuse_unread(
            "algorithm",
            "advantage",
            {
                "score_mean": ("grpo",),
                "score_std": ("grpo",),
                "gamma": ("gae", "reinforce_pp"),
                "lambda_actor": ("gae",),
                "length_adaptive_alpha": ("gae",),
                "lambda_critic": ("gae",),
                "value_clip": ("gae",),
                "value_aggregation": ("gae",),
            },
        )
        self.refuse_unread("algorithm", "policy_loss", {"dual_clip": ("ppo", "gspo")})
        self.refuse_unread("algorithm", "importance_correction", {"importance_cap": ("token", "sequence")})
        if self.length_adaptive_alpha is not None and self.lambda_actor != 0.95:
            raise ValueError(
                "algorithm.length_adaptive_alpha takes the place of lambda_actor: set one of them"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("algorithm.kl_target adapts kl_coef from its first value: set kl_coef above 0")
        if self.kl_coef > 0 and self.kl_in != "reward" and self.kl_kind == "k1":
            raise ValueError(
                "algorithm.kl_kind=k1 as a loss pushes nowhere on average (its gradient is that of the "
                "log-prob): use k2 or k3, or kl_in=reward"
            )
        return self
