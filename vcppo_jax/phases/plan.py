"""`vcppo plan`: the programs of a run's RL steps, compiled for hardware that need not be here.

They are the programs that training runs: the functions, shardings and donations are those of `Learner`,
`Scorer` and `rollout.programs`, and each takes what the one before it gives. What a chip must hold besides a
program's own arguments (the other network's state while one is updated, both while the rollout runs) counts
as resident.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vcppo_jax.aot.program import GIB, Cost, DoesNotFit, bytes_per_chip, compile_program
from vcppo_jax.aot.topology import Topology
from vcppo_jax.config import Config
from vcppo_jax.models.config import ModelConfig, model_config
from vcppo_jax.models.specs import is_spec, param_shardings, weight_specs
from vcppo_jax.phases.artifacts import find_model
from vcppo_jax.phases.collect import rollout_sampling
from vcppo_jax.phases.experience import trace_experience
from vcppo_jax.phases.networks import actor_learner, actor_objective, critic_learner
from vcppo_jax.phases.shapes import packed_shape
from vcppo_jax.rollout import programs
from vcppo_jax.rollout.plan import CHUNK_STEPS, plan_slots, prompt_bucket
from vcppo_jax.rollout.slots import Entry
from vcppo_jax.sharding import batch_shards, make_mesh, rollout_mesh
from vcppo_jax.train.learner import Scorer
from vcppo_jax.train.objectives import LogprobScore, ValueObjective, ValueScore

SPARE = 0.1
"""Share of a chip's memory that a plan must leave free: for the runtime, fragmentation and collectives."""
Traced = jax.stages.Traced


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of a sequence that the times are for; memory is that of the longest ones."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        """Both."""
        return self.prompt + self.response


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """One program of a step."""

    name: str
    shape: str
    """What it is compiled for, in words."""
    calls: float
    """In a step of RL."""
    trips: float
    """Turns of its outer loop in a call: micro-batches, decode steps."""
    resident_bytes: float
    """On a chip, besides the program's own."""
    cost: Cost | None
    """None where it does not fit."""
    needed_bytes: float | None
    """On a chip, all together; None where the compiler does not say."""

    @property
    def seconds(self) -> float:
        """In a step, at least."""
        return 0.0 if self.cost is None else self.calls * self.cost.seconds


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """All programs of a configuration on a topology."""

    config: Config
    topology: Topology
    mesh: Mesh
    lengths: Lengths
    policy: ModelConfig
    value_model: ModelConfig | None
    programs: tuple[ProgramPlan, ...]

    @property
    def memory_bytes(self) -> float:
        """What a chip has."""
        return self.topology.chip.memory_gib * GIB

    @property
    def used(self) -> float | None:
        """The largest share of a chip's memory that a program needs; None where one's need is not known."""
        needs = [program.needed_bytes for program in self.programs]
        return None if None in needs else max(n for n in needs if n is not None) / self.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether every program leaves `SPARE` of the memory free."""
        return self.used is not None and self.used <= 1 - SPARE


def network_configs(config: Config) -> tuple[ModelConfig, ModelConfig | None]:
    """The architectures of policy and value model, of which config.json has to be there, not the weights."""
    model = config.model
    options: dict[str, Any] = {
        "compute_dtype": model.compute_dtype,
        "remat": model.remat,
        "attention": model.attention,
    }
    policy = model_config(find_model(model.path).model_dir, **options)
    if config.algorithm.advantage != "gae":
        return policy, None
    path = config.value_model.path
    if path is None or config.value_model.init == "policy":
        return policy, policy
    return policy, model_config(find_model(path, "critic").model_dir, **options)


class StepPrograms:
    """Traces and compiles the programs of one RL step, in the order in which the step runs them."""

    def __init__(self, config: Config, topology: Topology, lengths: Lengths) -> None:
        """Raises ValueError, ConfigError or TopologyError for what cannot be planned."""
        self.config, self.topology, self.lengths = config, topology, lengths
        self.mesh = make_mesh(config.mesh.sizes, topology.devices)
        self.rollout_mesh = rollout_mesh(self.mesh, config.mesh.decode_tensor)
        self.policy, self.value_model = network_configs(config)
        self.samples = config.rl.prompts_per_step * config.rollout.n

        def quiet(_: str) -> None:
            """The plan does not warn of the schedule."""

        self.actor = actor_learner(config, self.mesh, self.policy, quiet)
        self.critic = None
        if self.value_model is not None:
            head_bias = config.value_model.head_bias
            self.critic = critic_learner(
                config, self.mesh, self.value_model, quiet, head_bias=head_bias, phase="rl"
            )
        actor = self.actor.abstract_state
        self.actor_bytes, self.params_bytes = bytes_per_chip(actor), bytes_per_chip(actor.params)
        self.critic_bytes = 0 if self.critic is None else bytes_per_chip(self.critic.abstract_state)
        self.reference_bytes = 0
        if config.algorithm.kl_coef > 0:
            self.reference_bytes = bytes_per_chip(self._reference())
        self.programs: list[ProgramPlan] = []

    def _reference(self) -> Any:
        """The reference's weights: in the compute dtype, as `mesh.layout.reference` says."""
        specs, dtype = weight_specs(self.policy, head="lm"), jnp.dtype(self.policy.compute_dtype)
        shardings = param_shardings(specs, self.mesh, self.config.mesh.layout.reference)
        return jax.tree.map(
            lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding),
            specs,
            shardings,
            is_leaf=is_spec,
        )

    def plan(self, parts: tuple[str, ...], say: Callable[[str], None]) -> RunPlan:
        """The plan of these parts of a step (of `PARTS`); `say` is told what is being compiled."""
        for part in parts:
            PARTS[part](self, say)
        return RunPlan(
            self.config,
            self.topology,
            self.mesh,
            self.lengths,
            self.policy,
            self.value_model,
            tuple(self.programs),
        )

    def compile(
        self,
        say: Callable[[str], None],
        name: str,
        shape: str,
        trace: Callable[[], Traced],
        *,
        calls: float,
        resident: float,
        trips: float = 1.0,
        mesh: Mesh | None = None,
        earlier: int = 0,
    ) -> Any:
        """Shapes and shardings of the program's results; None where it does not fit.

        The results of so many `earlier` calls are still there in the last one.
        """
        say(f"{name}: {shape}")
        mesh = self.mesh if mesh is None else mesh
        with jax.set_mesh(mesh):
            traced = trace()
            try:
                compiled = compile_program(traced, self.topology, mesh, unknown_trips=trips)
            except DoesNotFit as error:
                needed = None if error.bytes is None else error.bytes + resident
                self.programs.append(ProgramPlan(name, shape, calls, trips, resident, None, needed))
                return None
        resident += earlier * bytes_per_chip(compiled.results)
        needed = compiled.cost.peak_bytes + resident
        own = compiled.cost.peak_bytes / GIB
        seconds = compiled.cost.compile_seconds
        say(f"{name}: {own:.2f} GiB, {resident / GIB:.2f} resident; compiled in {seconds:.0f} s")
        self.programs.append(ProgramPlan(name, shape, calls, trips, resident, compiled.cost, needed))
        return compiled.results

    def rollout(self, say: Callable[[str], None]) -> None:
        """Reshard to the weights for decoding, then what the engine runs."""
        config, rollout = self.config, self.config.rollout
        bucket = prompt_bucket(config.data.max_prompt_tokens)
        mesh, width = self.rollout_mesh, rollout.max_new_tokens
        plan = plan_slots(
            config.rl.prompts_per_step, rollout.n, rollout.batch_size, batch_shards(mesh), bucket, width
        )
        slots_count, cache_size = plan.slots[0], plan.caches[-1]
        states = self.actor_bytes + self.critic_bytes + self.reference_bytes
        weights = self._decode_weights(say, states)
        if weights is None:
            return
        weight_bytes = bytes_per_chip(weights)
        slots = self.compile(
            say,
            "new slots",
            f"{slots_count} slots of {cache_size} tokens",
            lambda: programs.new_slots.trace(self.policy, slots_count, cache_size, width),
            calls=1,
            resident=states + weight_bytes,
            mesh=mesh,
        )
        if slots is None:
            return
        integers = _integers
        cache = self.compile(
            say,
            "prefill",
            f"{plan.prompts} prompts of {bucket} tokens",
            lambda: programs.prefill.trace(
                weights, self.policy, integers(plan.prompts, bucket), integers(plan.prompts)
            ),
            calls=math.ceil(config.rl.prompts_per_step / plan.prompts),
            resident=states + bytes_per_chip(slots),
            mesh=mesh,
        )
        if cache is None:
            return
        each = integers(plan.admit)
        entry = Entry(each, each, each, each, integers(plan.admit, dtype=np.uint32), each)
        self.compile(
            say,
            "swap",
            f"{plan.admit} samples into slots",
            lambda: programs.swap.trace(slots, cache, entry),
            calls=math.ceil(self.samples / plan.admit),
            resident=states + weight_bytes,
            mesh=mesh,
        )
        steps = max(self.lengths.response, math.ceil(self.samples * self.lengths.response / slots_count))
        eos = integers(max(1, len(self.policy.eos_token_ids)))
        key = jax.eval_shape(jax.random.key, integers())
        self.compile(
            say,
            "decode",
            f"chunk of {CHUNK_STEPS} tokens in {slots_count} slots",
            lambda: programs.advance.trace(
                weights,
                self.policy,
                rollout_sampling(config),
                eos,
                key,
                slots,
                integers(slots_count, dtype=bool),
                integers(),
            ),
            calls=math.ceil(steps / CHUNK_STEPS),
            resident=states + bytes_per_chip(cache),
            trips=CHUNK_STEPS,
            mesh=mesh,
        )

    def _decode_weights(self, say: Callable[[str], None], states: float) -> Any:
        """The weights for decoding, beside the `states`; None where they do not fit."""
        policy, count = self.policy, self.policy.num_layers
        layers, rest = programs.split_layers(self.actor.abstract_state.params)
        int8 = self.config.rollout.int8_weights
        layer = self.compile(
            say,
            "reshard layer",
            "a layer to weights for decoding",
            lambda: programs.decode_layer.trace(layers, _integers(), policy, int8=int8),
            calls=count,
            resident=states - bytes_per_chip(layers),
            mesh=self.rollout_mesh,
            earlier=count - 1,
        )
        if layer is None:
            return None
        placed = self.compile(
            say,
            "reshard rest",
            "embedding, norm and head to weights for decoding",
            lambda: programs.decode_rest.trace(rest, policy),
            calls=1,
            resident=states - bytes_per_chip(rest) + count * bytes_per_chip(layer),
            mesh=self.rollout_mesh,
        )
        return None if placed is None else {**placed, "layers": (layer,) * count}

    def _rows(self, sequences: int) -> tuple[Any, float, str]:
        """(packed shape, micro-batches in use at the plan's lengths, in words) of so many sequences."""
        shape = packed_shape(self.config, self.mesh, self.config.rollout.max_new_tokens, sequences)
        tokens = sequences * self.lengths.total
        used = min(shape.micro_batches, math.ceil(tokens / (shape.rows * shape.row_tokens)))
        return shape, used, f"{used} micro-batches of {shape.rows} x {shape.row_tokens} tokens"

    def log_probs(self, say: Callable[[str], None]) -> None:
        """Old and, with a KL term, reference log-probs."""
        shape, used, words = self._rows(self.samples)
        score = Scorer(LogprobScore(self.policy, self.config.rollout.temperature), self.mesh)
        params = self.actor.abstract_state.params
        self.compile(
            say,
            "log-probs",
            words,
            lambda: score.trace(params, shape),
            calls=2 if self.reference_bytes else 1,
            resident=self.actor_bytes - self.params_bytes + self.critic_bytes + self.reference_bytes,
            trips=used,
        )

    def values(self, say: Callable[[str], None]) -> None:
        """Values of the whole rollout."""
        if self.critic is None or self.value_model is None:
            return
        shape, used, words = self._rows(self.samples)
        score, params = Scorer(ValueScore(self.value_model), self.mesh), self.critic.abstract_state.params
        others = self.critic_bytes - bytes_per_chip(params)
        self.compile(
            say,
            "values",
            words,
            lambda: score.trace(params, shape),
            calls=1,
            resident=self.actor_bytes + self.reference_bytes + others,
            trips=used,
        )

    def advantages(self, say: Callable[[str], None]) -> None:
        """Advantages and returns of the whole rollout."""
        self.compile(
            say,
            "advantages",
            f"{self.samples} responses of {self.config.rollout.max_new_tokens} tokens",
            lambda: trace_experience(self.config, self.mesh, self.samples),
            calls=1,
            resident=self.actor_bytes + self.critic_bytes + self.reference_bytes,
        )

    def critic_update(self, say: Callable[[str], None]) -> None:
        """One mini-batch of the value model."""
        if self.critic is None:
            return
        critic = self.critic
        shape, used, words = self._rows(self.config.rl.mini_batch_size)
        self.compile(
            say,
            "critic update",
            words,
            lambda: critic.trace(shape, ValueObjective.fields),
            calls=self.config.critic.epochs * math.ceil(self.samples / self.config.rl.mini_batch_size),
            resident=self.actor_bytes + self.reference_bytes,
            trips=used,
        )

    def actor_update(self, say: Callable[[str], None]) -> None:
        """One mini-batch of the policy."""
        algorithm, rl = self.config.algorithm, self.config.rl
        extra = algorithm.sft_batch_size if algorithm.sft_coef > 0 else 0
        shape, used, words = self._rows(rl.mini_batch_size + extra)
        self.compile(
            say,
            "actor update",
            words,
            lambda: self.actor.trace(shape, actor_objective(self.config, self.policy).fields),
            calls=self.config.actor.epochs * math.ceil(self.samples / rl.mini_batch_size),
            resident=self.critic_bytes + self.reference_bytes,
            trips=used,
        )


PARTS: dict[str, Callable[[StepPrograms, Callable[[str], None]], None]] = {
    "actor-update": StepPrograms.actor_update,
    "critic-update": StepPrograms.critic_update,
    "rollout": StepPrograms.rollout,
    "log-probs": StepPrograms.log_probs,
    "values": StepPrograms.values,
    "advantages": StepPrograms.advantages,
}
"""Parts of a step by the names that the command knows; what needs most memory comes first."""


def _integers(*shape: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
