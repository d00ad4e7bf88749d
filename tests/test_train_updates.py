"""Updates over packed micro-batches: same gradients however they are cut, skips, ratios, the optimizer."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_networks import assert_trees_close, random_params, tiny_config

from vcppo_jax.algos.losses import kl_penalty, token_weights, value_loss, weighted_sum
from vcppo_jax.algos.policy import gspo_loss, policy_loss
from vcppo_jax.data.packing import Packing, PackShape
from vcppo_jax.models.decoder import hidden_states
from vcppo_jax.models.heads import token_logprobs
from vcppo_jax.models.networks import ValueModel, values
from vcppo_jax.models.specs import WeightSpec, weight_specs
from vcppo_jax.sharding import make_mesh
from vcppo_jax.train.learner import Learner, NonFiniteError, Scorer
from vcppo_jax.train.minibatches import Samples, mini_batches
from vcppo_jax.train.objectives import LogprobScore, PolicyObjective, ValueObjective
from vcppo_jax.train.optimizer import decay_mask, learning_rate_schedule, make_optimizer
from vcppo_jax.train.updates import accumulate

CONFIG = tiny_config("qwen2", num_hidden_layers=1)
POLICY = PolicyObjective(
    config=CONFIG,
    temperature=0.7,
    policy_loss="ppo",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=3.0,
    importance=False,
    kl_kind="k3",
    entropy_coef=0.01,
    positive_nll_coef=0.0,
    sft_coef=0.0,
)
GSPO = dataclasses.replace(
    POLICY, policy_loss="gspo", importance=True, kl_kind=None, positive_nll_coef=0.2, sft_coef=0.3
)
VALUE = ValueObjective(config=CONFIG, clip=0.2)
OBJECTIVES = {"policy": (POLICY, "lm"), "gspo and all terms": (GSPO, "lm"), "value": (VALUE, "value")}
# 7 to 12 tokens each: none shares a row of 12, two or three share one of 36. Responses of 1 to 8 tokens.
PROMPT_LENGTHS = np.array([6, 3, 4, 6, 2, 3, 3, 4])
LENGTHS = np.array([1, 8, 4, 2, 5, 6, 7, 8])
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, 60, n).tolist() for n in PROMPT_LENGTHS]
RESPONSES = RNG.integers(1, 60, (8, 8)).astype(np.int32)
MASK = np.arange(8)[None] < LENGTHS[:, None]
SHAPES = {
    "1x8": PackShape(1, 8, 12),
    "2x4": PackShape(2, 4, 12),
    "8x1": PackShape(8, 1, 12),
    "packed": PackShape(5, 1, 36),  # micro-batches to spare
}
AGGREGATIONS = ("token-mean", "seq-mean-token-mean")


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def one_device():
    return make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])


def adamw(learning_rate=1e-2, **changes):
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
    return make_optimizer(optax.constant_schedule(learning_rate), **(settings | changes))


def fields(aggregation):
    rng = np.random.default_rng(1)
    draws = {
        name: rng.normal(size=(8, 8)).astype(np.float32) for name in ("advantages", "returns", "old_values")
    }
    for name in ("old_logprobs", "ref_logprobs"):  # near those of the policy, log(1/64): ratios of about 1
        draws[name] = (-np.log(64) + 0.3 * rng.normal(size=(8, 8))).astype(np.float32)
    draws["weights"] = np.asarray(token_weights(MASK, aggregation=aggregation))
    draws["token_mean"] = np.asarray(token_weights(MASK, aggregation="token-mean"))
    draws["kl_weights"] = 0.1 * draws["weights"]
    draws["importance"] = rng.uniform(0.5, 2.0, (8, 8)).astype(np.float32)
    for name, rows in (("positive_weights", slice(0, 3)), ("sft_weights", slice(5, 8))):
        only = np.zeros_like(MASK)
        only[rows] = MASK[rows]
        draws[name] = np.asarray(token_weights(only, aggregation="token-mean"))
    return draws


@functools.cache
def params(head):
    """Small weights, so that gradients are of order 1 and 1e-5 is a tight bound in float32."""
    return jax.tree.map(lambda x: 0.4 * x, random_params(CONFIG, head=head))


@functools.cache
def compiled(objective):
    return jax.jit(functools.partial(accumulate, objective))


def gradients(objective, head, shape, aggregation):
    """(gradients, loss, info) of the eight samples, cut as `shape`."""
    packing = Packing(PROMPTS, RESPONSES, LENGTHS, shape)
    batch = packing.batch(fields(aggregation))
    return compiled(objective)(params(head), batch, np.int32(packing.micro_batches))


@functools.cache
def padded_oracle(objective, head):
    """The same from the public functions on a right-padded batch: no packing, no micro-batches."""
    tokens = np.zeros((8, 16), np.int32)
    for row, prompt, response, length in zip(tokens, PROMPTS, RESPONSES, LENGTHS):
        row[: len(prompt) + length] = [*prompt, *response[:length]]
    at = PROMPT_LENGTHS[:, None] - 1 + np.arange(8)[None]

    def policy(params, data):
        hidden = hidden_states(params, CONFIG, tokens)
        targets = jnp.roll(tokens, -1, axis=1)
        both = token_logprobs(params, CONFIG, hidden, targets, temperature=0.7)
        x, entropy = (jnp.take_along_axis(numbers, at, 1) for numbers in both)
        common = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
        arrays = (x, data["old_logprobs"], data["advantages"], MASK)
        bonus = 0.01 * weighted_sum(entropy, data["weights"])
        if objective is GSPO:
            loss, _ = gspo_loss(*arrays, weights=data["weights"] * data["importance"], **common)
            nll = -0.2 * weighted_sum(x, data["positive_weights"]) - 0.3 * weighted_sum(
                x, data["sft_weights"]
            )
            return loss + nll - bonus
        loss, _ = policy_loss(*arrays, weights=data["weights"], **common)
        kl = kl_penalty(x, data["ref_logprobs"], kind="k3", mask=MASK)
        return loss + 0.1 * weighted_sum(kl, data["weights"]) - bonus

    def value(params, data):
        x = jnp.take_along_axis(values(ValueModel(params, CONFIG), tokens), at, 1)
        old, returns = data["old_values"], data["returns"]
        return value_loss(x, old, returns, MASK, clip=0.2, weights=data["weights"])[0]

    return jax.jit(jax.value_and_grad(policy if head == "lm" else value))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("objective", "head"), OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_cut_changes_nothing(objective, head, aggregation):
    whole = gradients(objective, head, SHAPES["1x8"], aggregation)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(whole[0])) > 1e-2
    for name, shape in SHAPES.items():
        cut = gradients(objective, head, shape, aggregation)
        for ours, theirs in zip(jax.tree.leaves(cut), jax.tree.leaves(whole)):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("objective", "head"), OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_packed_gradient_is_that_of_the_padded_batch(objective, head):
    data = fields("token-mean")
    loss, expected = padded_oracle(objective, head)(params(head), data)
    found, packed_loss, _ = gradients(objective, head, SHAPES["packed"], "token-mean")
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-5)
    assert_trees_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def samples():
    return Samples(PROMPTS, RESPONSES, LENGTHS, lambda count: PackShape(count, 1, 36))


@functools.cache
def actor_learner():
    # A learning rate at which the second mini-batch still sees the policy of the first.
    return Learner(
        *("actor", weight_specs(CONFIG, head="lm"), POLICY, adamw(1e-12), one_device()), max_skipped=1
    )


def first_update(samples, *, scored_at):
    """Infos of the first mini-batches at temperature 0.7 of a policy whose old log-probs are at this one."""
    learner = actor_learner()
    packing = Packing(PROMPTS, RESPONSES, LENGTHS, SHAPES["1x8"])
    old = Scorer(LogprobScore(CONFIG, scored_at), one_device())(params("lm"), packing)
    batches = mini_batches(
        samples,
        {"old_logprobs": old, "ref_logprobs": old, "advantages": fields("token-mean")["advantages"]},
        epochs=1,
        mini_batch_size=4,
        aggregation="token-mean",
        norm_length=8,
        seed=(0, 1),
        kl_coef=0.1,
    )
    state, infos = learner.steps(learner.new_state(jax.tree.map(jnp.copy, params("lm"))), batches, "test")
    assert int(state.updates) == len(infos) == 2
    return infos


def test_at_the_first_update_the_ratio_is_1_and_the_kl_0(samples):
    # Old log-probs come from unpacked rows in one batch, the update's from packed rows one by one.
    for info in first_update(samples, scored_at=0.7):
        assert info["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert info["ppo_kl"] == pytest.approx(0, abs=1e-5)
        assert info["kl_loss"] == pytest.approx(0, abs=1e-6)
        assert info["pg_clipfrac"] == 0


def test_another_temperature_would_show(samples):
    assert abs(first_update(samples, scored_at=1.0)[0]["ratio_mean"] - 1) > 1e-3


# A loss of which every part is in hand: sum(weights * x) * |kernel|^2, plus a constant `offset` per token.
TOY_SPECS = {
    "w": {
        "kernel": WeightSpec((2, 3), (None, None), "ones", "w", False),
        "bias": WeightSpec((2, 3), (None, None), "ones", "b", False),
    }
}


def toy_loss(params, batch):
    scale = jnp.sum(batch.fields["weights"] * batch.fields["x"])
    loss = scale * jnp.sum(params["w"]["kernel"] ** 2) + jnp.sum(batch.fields["offset"])
    return loss, {}


@functools.cache
def compiled_toy(max_skipped, **changes):
    return Learner("critic", TOY_SPECS, toy_loss, adamw(**changes), one_device(), max_skipped=max_skipped)


def toy_learner(**settings):
    learner = compiled_toy(**settings)
    state = learner.new_state({"w": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones((2, 3))}})
    packing = Packing([[1], [2]], np.ones((2, 2), np.int32), np.array([2, 1]), PackShape(2, 1, 3))

    def step(state, x=1.0, offset=0.0):
        ones = np.ones((2, 2), np.float32)
        given = {"weights": ones / 3, "x": ones * x, "offset": ones * offset}
        return learner.step(state, packing, given, "value step 7")

    return state, step


def test_weights_and_moments_are_updated_in_place():
    state, step = toy_learner(max_skipped=3)
    old = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert len(old) == 6  # two weights and their moments
    state, _ = step(state)
    assert all(leaf.is_deleted() for leaf in old)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_the_compiled_actor_update_has_no_second_copy_of_the_state():
    learner = actor_learner()
    packing = Packing(PROMPTS, RESPONSES, LENGTHS, SHAPES["1x8"])
    given = dict.fromkeys(("old_logprobs", "ref_logprobs", "advantages", "kl_weights"), MASK)
    batch = packing.batch(given | {"weights": MASK, "token_mean": MASK})
    compiled = learner._update.lower(learner.abstract_state, batch, np.int32(1)).compile()
    size = 3 * 4 * sum(x.size for x in jax.tree.leaves(params("lm")))  # weights and both moments
    assert compiled.memory_analysis().alias_size_in_bytes >= size


@pytest.mark.parametrize("bad", [{"x": np.nan}, {"x": np.inf}, {"offset": np.nan}, {"offset": np.inf}])
def test_an_update_that_is_not_finite_is_skipped_and_counted(bad):
    state, step = toy_learner(max_skipped=3)
    state, info = step(state)
    assert (info["skipped"], info["skipped_in_row"]) == (0, 0)
    before = jax.device_get((state.params, state.opt_state.inner_state))
    state, info = step(state, **bad)
    assert (info["skipped"], info["skipped_in_row"]) == (1, 1)
    assert not np.isfinite(info["grad_norm"])
    after = jax.device_get((state.params, state.opt_state.inner_state))
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(before)):
        np.testing.assert_array_equal(ours, theirs)
    assert int(state.updates) == 2
    state, info = step(state)
    assert (info["skipped"], info["skipped_in_row"]) == (0, 0)
    assert not np.array_equal(state.params["w"]["kernel"], before[0]["w"]["kernel"])


def test_so_many_skips_in_a_row_end_the_run():
    state, step = toy_learner(max_skipped=3)
    for x in (np.nan, np.nan, 1.0, np.nan, np.nan):
        state, _ = step(state, x=x)
    with pytest.raises(NonFiniteError, match="value step 7: critic: 3 updates in a row"):
        step(state, x=np.nan)


def test_the_norm_is_that_before_clipping():
    state, step = toy_learner(max_skipped=3)
    # Three tokens of weight 1/3: the gradient is 2 in each of the kernel's six entries.
    assert step(state)[1]["grad_norm"] == pytest.approx(2 * 6**0.5, rel=1e-6)


def test_weight_decay_reaches_matrices_only():
    state, step = toy_learner(max_skipped=3, weight_decay=0.5, learning_rate=0.1)
    state, _ = step(state, x=0.0)  # no gradient: what moves is decay
    np.testing.assert_allclose(state.params["w"]["kernel"], 1 - 0.1 * 0.5, rtol=1e-6)
    np.testing.assert_array_equal(state.params["w"]["bias"], 1)


@pytest.mark.parametrize("case", ["llama_biases", "qwen2", "qwen3"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_decay_mask_names_every_matrix_of_a_model(case, head):
    def per_layer(spec):
        return len(spec.shape) - (spec.axes[0] == "layers")

    specs = weight_specs(tiny_config(case), head=head, head_bias=head == "value")
    leaf = {"is_leaf": lambda x: isinstance(x, WeightSpec)}
    expected = jax.tree.map(lambda spec: per_layer(spec) == 2, specs, **leaf)
    shapes = jax.tree.map(lambda spec: np.zeros(spec.shape), specs, **leaf)
    assert decay_mask(shapes) == expected


def rates(schedule, warmup_steps, updates, counts):
    made = learning_rate_schedule(
        learning_rate=2.0, warmup_steps=warmup_steps, schedule=schedule, updates=updates
    )
    return [float(made(count)) for count in counts]


def test_schedules():
    assert rates("constant", 0, 10, [0, 5, 99]) == pytest.approx([2, 2, 2])
    assert rates("linear", 0, 10, [0, 5, 9, 10, 20]) == pytest.approx([2, 1, 0.2, 0, 0])
    assert rates("cosine", 0, 10, [0, 5, 10]) == pytest.approx([2, 1, 0], abs=1e-6)
    # The first of four warm-up updates already has a quarter of the peak, the fourth all of it.
    assert rates("constant", 4, 10, range(6)) == pytest.approx([0.5, 1, 1.5, 2, 2, 2])
    assert rates("linear", 4, 14, [3, 4, 9, 14]) == pytest.approx([2, 2, 1, 0])
    assert rates("cosine", 4, 14, [3, 4, 9, 14]) == pytest.approx([2, 2, 1, 0], abs=1e-6)
    assert rates("constant", 1, 10, [0, 1]) == pytest.approx([2, 2])
