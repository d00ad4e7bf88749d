"""Five VC-PPO steps on fixed rollouts: one trajectory on every mesh and layout, and with any remat.

`python tests/test_train_sharding.py` prints it as a table, with the largest differences.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_networks import random_params, tiny_config

from vcppo_jax.data.packing import Packing, pack_shape
from vcppo_jax.models.specs import param_shardings, weight_specs
from vcppo_jax.phases.artifacts import resharded
from vcppo_jax.run.checkpoint import Checkpoints
from vcppo_jax.sharding import batch_shards, length_shards, make_mesh
from vcppo_jax.train.experience import AdvantageSettings, build_experience
from vcppo_jax.train.learner import Learner, Scorer, put_batch
from vcppo_jax.train.minibatches import Samples, mini_batches
from vcppo_jax.train.objectives import LogprobScore, PolicyObjective, ValueObjective, ValueScore
from vcppo_jax.train.optimizer import make_optimizer
from vcppo_jax.train.updates import TrainState

STEPS, SEQUENCES, RESPONSE = 5, 8, 7
SETTINGS = AdvantageSettings(
    advantage="gae",
    group_size=1,
    gamma=1.0,
    lambda_actor=0.95,
    score_mean="group",
    score_std="group",
    length_adaptive_alpha=None,
    lambda_critic=1.0,
    whiten=True,
    kl_in_reward=True,
    kl_kind="k1",
)
EXPERIENCE = jax.jit(functools.partial(build_experience, settings=SETTINGS))
MESHES = {
    "one device": {"data": 1, "fsdp": 1, "tensor": 1},
    "fsdp 8": {"data": 1, "fsdp": 8, "tensor": 1},
    "fsdp 4 x tensor 2": {"data": 1, "fsdp": 4, "tensor": 2},
    "fsdp 2 x sequence 2 x tensor 2": {"fsdp": 2, "sequence": 2, "tensor": 2},
}


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


LAYOUTS = {"fsdp 2 x sequence 2 x tensor 2": {"critic": "tensor", "reference": "replicated"}}
"""Where a network is not in the default layout."""


def layout_of(mesh_name, network):
    return LAYOUTS.get(mesh_name, {}).get(network, "fsdp")


def mesh_of(name):
    sizes = MESHES[name]
    return make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])


def rollout(step, mesh):
    """(samples, scores) of one step, the same whatever the mesh."""
    rng = np.random.default_rng(step)
    prompts = [rng.integers(1, 60, n).tolist() for n in rng.integers(1, 6, SEQUENCES)]
    responses = rng.integers(1, 60, (SEQUENCES, RESPONSE)).astype(np.int32)
    lengths = rng.integers(1, RESPONSE + 1, SEQUENCES)

    def shape_for(count):
        return pack_shape(
            sequences=count,
            row_tokens=15,
            micro_batch_tokens=48,
            shards=batch_shards(mesh),
            length_shards=length_shards(mesh),
        )

    scores = rng.choice([-1.0, 1.0], SEQUENCES).astype(np.float32)
    return Samples(prompts, responses, lengths, shape_for), scores


def learner(name, config, head, objective, mesh, layout):
    # An epsilon well above rounding: Adam divides a gradient by its own size, noise included.
    optimizer = make_optimizer(
        optax.constant_schedule(3e-3), beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.01, max_grad_norm=1.0
    )
    specs = weight_specs(config, head=head)
    made = Learner(name, specs, objective, optimizer, mesh, max_skipped=1, layout=layout)
    start = jax.device_put(random_params(config, head=head), param_shardings(specs, mesh, layout))
    return made, made.new_state(start)


class Run(NamedTuple):
    """What is there after five steps."""

    actor: TrainState
    critic: TrainState
    numbers: list[dict[str, float]]
    """Of every step."""
    packing: Packing
    """The last rollout, and its values as the devices have them, [M, R, L]."""
    values: jax.Array
    abstract: dict[str, TrainState]
    """Shapes and shardings of the two states."""


@functools.cache
def trajectory(mesh_name, remat):
    """Five steps on one mesh."""
    mesh = mesh_of(mesh_name)
    config = tiny_config("llama", remat=remat)
    policy_objective = PolicyObjective(
        config=config, temperature=0.7, policy_loss="ppo", clip_low=0.2, clip_high=0.2, dual_clip=None,
        importance=False, kl_kind=None, entropy_coef=0.01, positive_nll_coef=0.0, sft_coef=0.0,
    )  # fmt: skip
    numbers = []
    with jax.set_mesh(mesh):
        actor_learner, actor = learner(
            "actor", config, "lm", policy_objective, mesh, layout_of(mesh_name, "actor")
        )
        critic_learner, critic = learner(
            "critic", config, "value", ValueObjective(config, 0.5), mesh, layout_of(mesh_name, "critic")
        )
        score_logprobs = Scorer(LogprobScore(config, 0.7), mesh)
        score_values = Scorer(ValueScore(config), mesh)
        reference = jax.tree.map(jnp.copy, actor.params)
        if (layout := layout_of(mesh_name, "reference")) != layout_of(mesh_name, "actor"):
            specs = weight_specs(config, head="lm")
            reference = resharded(actor.params, specs, mesh, layout=layout, dtype="float32")
        for step in range(STEPS):
            samples, scores = rollout(step, mesh)
            packing = samples.pack()
            old = score_logprobs(actor.params, packing)
            ref = score_logprobs(reference, packing)
            values = score_values(critic.params, packing)
            mask = samples.mask.astype(np.float32)
            experience, _ = EXPERIENCE(scores, mask, mask, old, ref, values, 0.01)
            common = {"mini_batch_size": 4, "aggregation": "token-mean", "norm_length": RESPONSE, "epochs": 1}
            targets = {"returns": experience.returns, "old_values": values}
            batches = mini_batches(samples, targets, seed=(step, 0), **common)
            critic, critic_infos = critic_learner.steps(critic, batches, "test")
            targets = {"old_logprobs": old, "advantages": experience.advantages}
            batches = mini_batches(samples, targets, seed=(step, 1), **common)
            actor, actor_infos = actor_learner.steps(actor, batches, "test")
            infos = [*critic_infos, *actor_infos]
            for info in infos:
                del info["packing_efficiency"]  # a mesh rounds the rows up to its shards
            # The last mini-batch of each network stands for the step.
            row = {f"{name}/{key}": x for name, infos in (("critic", critic_infos), ("actor", actor_infos))
                   for key, x in infos[-1].items()}  # fmt: skip
            sums = {"old_logprobs": old.sum(), "values": values.sum(), "ref_logprobs": ref.sum()}
            numbers.append(row | {name: float(x) for name, x in sums.items()})
        batch = put_batch(packing.batch({}), mesh)
        on_devices = score_values._score(critic.params, batch, np.int32(packing.micro_batches))
    abstract = {"actor": actor_learner.abstract_state, "critic": critic_learner.abstract_state}
    return Run(actor, critic, numbers, packing, on_devices, abstract)


def assert_same(ours, theirs):
    for mine, other in zip(ours[:2], theirs[:2]):
        pairs = zip(jax.tree_util.tree_leaves_with_path(mine.params), jax.tree.leaves(other.params))
        for (path, leaf), expected in pairs:
            np.testing.assert_allclose(
                leaf, expected, atol=1e-4, rtol=1e-4, err_msg=jax.tree_util.keystr(path)
            )
        assert int(mine.updates) == int(other.updates) == 2 * STEPS
    for mine, other in zip(ours.numbers, theirs.numbers):
        assert mine == pytest.approx(other, abs=1e-4, rel=1e-4)


def test_the_trajectory_goes_somewhere():
    actor, critic, *_ = trajectory("one device", "none")
    for state, head in ((actor, "lm"), (critic, "value")):
        start = random_params(tiny_config("llama"), head=head)
        moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.params, start)
        assert min(jax.tree.leaves(moved)) > 1e-3, moved


ON_MESHES = [("fsdp 8", "full"), ("fsdp 4 x tensor 2", "dots"), ("fsdp 2 x sequence 2 x tensor 2", "full")]


@pytest.mark.parametrize(("mesh_name", "remat"), ON_MESHES)
def test_one_trajectory_on_every_mesh_and_with_recomputation(mesh_name, remat):
    assert_same(trajectory(mesh_name, remat), trajectory("one device", "none"))


@pytest.mark.parametrize(("mesh_name", "remat"), ON_MESHES)
def test_every_device_has_the_same_values(mesh_name, remat):
    run, one = trajectory(mesh_name, remat), trajectory("one device", "none")
    values = run.values
    np.testing.assert_allclose(run.packing.gather(values), one.packing.gather(one.values), atol=1e-4)
    assert len(values.addressable_shards) == 8
    whole = np.asarray(values)
    for shard in values.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index], err_msg=str(shard.device))


@pytest.mark.parametrize(
    ("mesh_name", "remat", "shards"),
    [
        ("fsdp 8", "full", {"actor": (2, 4, 32), "critic": (2, 4, 32)}),
        ("fsdp 4 x tensor 2", "dots", {"actor": (2, 8, 16), "critic": (2, 8, 16)}),
        ("fsdp 2 x sequence 2 x tensor 2", "full", {"actor": (2, 8, 16), "critic": (2, 32, 16)}),
    ],
)
def test_parameters_and_moments_lie_in_shards_after_training(mesh_name, remat, shards):
    actor, critic, *_ = trajectory(mesh_name, remat)
    for name, state in (("actor", actor), ("critic", critic)):
        moments = state.opt_state.inner_state[1][0]
        for tree in (state.params, moments.mu, moments.nu):
            query = tree["layers"]["query"]["kernel"]
            assert query.shape == (2, 32, 32)
            assert {shard.data.shape for shard in query.addressable_shards} == {shards[name]}
            leaves = jax.tree.leaves(tree)
            total = sum(leaf.nbytes for leaf in leaves)
            held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
            # Their part each, but for norms and the value head.
            assert held < total * np.prod(shards[name]) / query.size * 8 / 7


def test_a_checkpoint_of_one_mesh_loads_on_another_in_other_layouts(tmp_path):
    written, there = trajectory("fsdp 8", "full"), trajectory("fsdp 2 x sequence 2 x tensor 2", "full")
    state = {"actor": written.actor, "critic": written.critic}
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(5, state, {})
        checkpoints.wait()
        read = checkpoints.restore_latest(there.abstract).state
    leaves = zip(jax.tree.leaves(read), jax.tree.leaves(state), jax.tree.leaves(there.abstract))
    for leaf, expected, abstract in leaves:
        assert leaf.sharding == abstract.sharding
        np.testing.assert_array_equal(leaf, expected)


def largest_difference(ours, theirs):
    """Over the parameters of both networks."""
    pairs = zip(
        jax.tree.leaves([x.params for x in ours[:2]]), jax.tree.leaves([x.params for x in theirs[:2]])
    )
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    runs = {name: trajectory(name, remat) for name, remat in (("one device", "none"), *ON_MESHES)}
    first, *others = runs
    keys = ("critic/loss", "actor/loss", "actor/grad_norm", "values")
    print("| step |", " | ".join(keys), "|", " | ".join(others), "|")
    print("|" + "---|" * (1 + len(keys) + len(others)))
    for step in range(STEPS):
        one = runs[first].numbers[step]
        differences = [max(abs(runs[name].numbers[step][key] - one[key]) for key in one) for name in others]
        cells = [f"{one[key]:.6f}" for key in keys] + [f"{x:.1e}" for x in differences]
        print(f"| {step + 1} |", " | ".join(cells), "|")
    cells = [f"{largest_difference(runs[name], runs[first]):.1e}" for name in others]
    print("| weights |", " | ".join([""] * len(keys) + cells), "|")


if __name__ == "__main__":
    main()
