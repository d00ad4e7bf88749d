"""The public functions on arrays under `jit`, as README has it: strings, None and sizes alone are static."""

import jax
import numpy as np
import pytest

import vcppo_jax as vc

RNG = np.random.default_rng(0)
X, Y, Z = (RNG.normal(size=(4, 6)).astype(np.float32) for _ in range(3))
MASK = (np.arange(6) < np.array([[6], [3], [1], [0]])).astype(np.float32)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"}
CALLS = {
    "gae": ((X, Y, MASK), {"gamma": 0.99, "lam": 0.95}),
    "gae_blocked": ((X, Y, MASK), {"gamma": 0.99, "lam": 0.95, "block_size": 2}),
    "decoupled_gae": ((X, Y, MASK), {"gamma": 1.0, "lambda_actor": 0.95, "lambda_critic": 1.0}),
    "reward_to_go": ((X, MASK), {"gamma": 0.9}),
    "length_adaptive_lambda": ((MASK.sum(1),), {"alpha": 0.5}),
    "policy_loss": ((X, Y, Z, MASK), CLIPS | {"dual_clip": 3.0}),
    "policy_loss without dual clip": ((X, Y, Z, MASK), CLIPS | {"dual_clip": None}),
    "gspo_loss": ((X, Y, Z, MASK), CLIPS | {"dual_clip": 3.0}),
    "cispo_loss": ((X, Y, Z, MASK), CLIPS | {"dual_clip": None}),
    "importance_weights": ((X, Y, MASK), {"level": "token", "cap": 2.0}),
    "value_loss": ((X, Y, Z, MASK), {"clip": 0.2, "aggregation": "token-mean"}),
    "kl_penalty": ((X, Y), {"kind": "k3"}),
    "token_weights": ((MASK,), {"aggregation": "seq-mean-token-sum-norm", "norm_length": 8.0}),
    "whiten": ((X, MASK), {}),
    "explained_variance": ((X, Y, MASK), {}),
    "bradley_terry_loss": ((X[:, 0], Y[:, 0]), {}),
    "group_advantages": ((X[:, 0],), {"group_size": 2, "mean": "group", "std": "batch"}),
    "rloo_advantages": ((X[:, 0],), {"group_size": 2}),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_may_be_traced(name):
    arrays, settings = CALLS[name]
    function = getattr(vc, name.split()[0])
    static = [
        k for k, v in settings.items() if v is None or isinstance(v, str) or k in ("group_size", "block_size")
    ]
    compiled = jax.jit(function, static_argnames=static)(*arrays, **settings)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), compiled, function(*arrays, **settings)
    )


def test_numbers_that_are_known_are_checked():
    for name, wrong in [
        ("policy_loss", {"clip_low": -0.1}),
        ("policy_loss", {"dual_clip": 1.0}),
        ("importance_weights", {"cap": 0.0}),
        ("length_adaptive_lambda", {"alpha": 0.0}),
        ("value_loss", {"clip": -1.0}),
        ("token_weights", {"norm_length": 0}),
    ]:
        arrays, settings = CALLS[name]
        with pytest.raises(ValueError, match=f"{name}: expected"):
            getattr(vc, name)(*arrays, **settings | wrong)
