"""Value-Calibrated PPO and its relatives for reasoning models, in JAX.

    import vcppo_jax as vc
    advantages, returns = vc.decoupled_gae(
        rewards, values, mask, gamma=1.0, lambda_actor=0.95, lambda_critic=1.0
    )

The names below are imported when they are first used, so that `import vcppo_jax` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcppo_jax.algos.advantages import group_advantages, rloo_advantages
    from vcppo_jax.algos.gae import (
        decoupled_gae,
        gae,
        gae_blocked,
        length_adaptive_lambda,
        reward_to_go,
    )
    from vcppo_jax.algos.losses import kl_penalty, token_weights, value_loss
    from vcppo_jax.algos.masked import explained_variance, whiten
    from vcppo_jax.algos.policy import cispo_loss, gspo_loss, importance_weights, policy_loss
    from vcppo_jax.algos.shaping import bradley_terry_loss
    from vcppo_jax.models.networks import Policy, ValueModel, logprobs, values
    from vcppo_jax.phases.artifacts import load_policy, load_value_model
    from vcppo_jax.rewards.score import verify
    from vcppo_jax.rollout.engine import generate
    from vcppo_jax.rollout.sampling import Sampling
    from vcppo_jax.types import Rollout

__version__ = "0.1.0"

_MODULES = {
    "algos.advantages": ("group_advantages", "rloo_advantages"),
    "algos.gae": ("decoupled_gae", "gae", "gae_blocked", "length_adaptive_lambda", "reward_to_go"),
    "algos.losses": ("kl_penalty", "token_weights", "value_loss"),
    "algos.masked": ("explained_variance", "whiten"),
    "algos.policy": ("cispo_loss", "gspo_loss", "importance_weights", "policy_loss"),
    "algos.shaping": ("bradley_terry_loss",),
    "models.networks": ("Policy", "ValueModel", "logprobs", "values"),
    "phases.artifacts": ("load_policy", "load_value_model"),
    "rewards.score": ("verify",),
    "rollout.engine": ("generate",),
    "rollout.sampling": ("Sampling",),
    "types": ("Rollout",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [  # noqa: RUF022  by topic
    "gae", "decoupled_gae", "gae_blocked", "length_adaptive_lambda", "reward_to_go",
    "group_advantages", "rloo_advantages",
    "policy_loss", "gspo_loss", "cispo_loss", "importance_weights",
    "value_loss", "kl_penalty", "token_weights", "bradley_terry_loss",
    "whiten", "explained_variance",
    "Policy", "ValueModel", "load_policy", "load_value_model", "logprobs", "values",
    "generate", "Sampling", "Rollout", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vcppo_jax' has no attribute {name!r}")
    return getattr(import_module(f"vcppo_jax.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
