"""Checkpoints: what comes back is what was saved, and no interruption or damage loses a run."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vcppo_jax.run.checkpoint import (
    CheckpointError,
    CheckpointMismatch,
    Checkpoints,
    _as_json,
    read_params,
)
from vcppo_jax.run.integrity import MANIFEST
from vcppo_jax.sharding import make_mesh

OPTIMIZER = optax.apply_if_finite(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mu_dtype=jnp.bfloat16)), 3
)


@flax.struct.dataclass
class Network:
    params: dict
    opt_state: optax.OptState
    steps: jax.Array
    name: str = flax.struct.field(pytree_node=False, default="net")


@flax.struct.dataclass
class State:
    actor: Network
    critic: Network
    key: jax.Array


def network(seed, width=16):
    rng = np.random.default_rng(seed)
    params = {
        "embed": jnp.asarray(rng.normal(size=(32, width)), jnp.float32),
        "layers": {
            "kernel": jnp.asarray(rng.normal(size=(2, width, 8)), jnp.float32),
            "none": jnp.zeros((0, 4)),
        },
    }
    state = OPTIMIZER.init(params)
    _, state = jax.jit(OPTIMIZER.update)(jax.tree.map(jnp.sin, params), state, params)
    return Network(params, state, jnp.uint32(seed))


def make_state(seed=0, width=16):
    return State(network(seed, width), network(seed + 1, width), jax.random.PRNGKey(seed))


@pytest.fixture(scope="module")
def state():
    return make_state()


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def assert_identical(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def fill(directory, state, steps=(1, 2, 3)):
    with Checkpoints(directory, keep_last=10) as checkpoints:
        for step in steps:
            assert checkpoints.save(step, state, {"step": step, "position": [step, 7]})
    return directory


def largest_file(directory):
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_what_was_saved_comes_back_bit_for_bit(tmp_path, state):
    meta = {"seed": 3, "best": float("-inf"), "nested": {"a": [1, 2.5, None, True]}, "big": 2**70}
    with Checkpoints(tmp_path / "made" / "here", keep_last=2) as checkpoints:
        assert checkpoints.restore_latest(abstract(state)) is None
        assert checkpoints.save(4, state, meta)
        meta["seed"] = 99  # what is saved are the values of the call
    with Checkpoints(tmp_path / "made" / "here", keep_last=2) as checkpoints:
        step, restored, saved_meta = checkpoints.restore_latest(abstract(state))
        assert checkpoints.restore_meta(4) == saved_meta == {**meta, "seed": 3}
    assert step == 4
    assert_identical(state, restored)
    assert not restored.key.committed
    assert restored.actor.params["embed"].sharding == state.actor.params["embed"].sharding
    jax.jit(OPTIMIZER.update)(restored.actor.params, restored.actor.opt_state, restored.actor.params)


@pytest.mark.parametrize("layout", ["one", "fsdp", "replicated"])
def test_buffers_may_be_donated_and_overwritten_right_after_save(tmp_path, layout):
    mesh = make_mesh({"fsdp": 8})
    sharding = {
        "one": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        "fsdp": NamedSharding(mesh, P("fsdp")),
        "replicated": NamedSharding(mesh, P()),
    }[layout]
    state = {f"w{n}": jax.device_put(jnp.arange(n, dtype=jnp.float32), sharding) for n in (8, 4096, 1 << 20)}
    state["host"] = np.arange(1 << 16)
    wanted = {name: np.array(x, copy=True) for name, x in state.items()}
    overwrite = jax.jit(lambda x: jax.tree.map(lambda y: y * 0 - 1, x), donate_argnums=0)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, state, {})
        host = state.pop("host")
        host[:] = -1
        for _ in range(3):
            state = overwrite(state)
        jax.block_until_ready(state)
    restored = Checkpoints(tmp_path, keep_last=1).restore_latest({**abstract(state), "host": host}).state
    assert isinstance(restored["host"], np.ndarray)
    for name in wanted:
        np.testing.assert_array_equal(restored[name], wanted[name])


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"fsdp": 1}, {"data": 2, "fsdp": 4}])
def test_a_checkpoint_of_one_mesh_loads_on_another(tmp_path, state, sizes):
    written = NamedSharding(make_mesh({"fsdp": 8}), P("fsdp"))
    params = state.actor.params["embed"]
    fill(tmp_path, {"w": jax.device_put(params, written)}, steps=[1])
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    wanted = NamedSharding(mesh, P("fsdp", "tensor"))
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        restored = checkpoints.restore_latest(
            {"w": jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=wanted)}
        )
    assert restored.state["w"].sharding == wanted
    np.testing.assert_array_equal(restored.state["w"], params)


def truncate(step):
    path = largest_file(step / "state")
    path.write_bytes(path.read_bytes()[:-5])


DAMAGE = {
    "bytes instead of": truncate,
    "wrong checksum": lambda step: flip(largest_file(step / "state"), at=3000),
    "is missing": lambda step: largest_file(step / "state").unlink(),
    "meta/metadata has a wrong checksum": lambda step: flip(step / "meta" / "metadata", at=9),
    f"{MANIFEST} cannot be read": lambda step: flip(step / MANIFEST, at=40),
    "_CHECKPOINT_METADATA is missing": lambda step: (step / "_CHECKPOINT_METADATA").unlink(),
    "_CHECKPOINT_METADATA cannot be read": lambda step: (step / "_CHECKPOINT_METADATA").write_text("{"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, state, kind, caplog):
    fill(tmp_path, state)
    DAMAGE[kind](tmp_path / "3")
    with Checkpoints(tmp_path, keep_last=10) as checkpoints:
        step, restored, meta = checkpoints.restore_latest(abstract(state))
        assert (step, meta["step"]) == (2, 2)
        assert_identical(state, restored)
        message = "\n".join(record.getMessage() for record in caplog.records)
        assert kind in message
        assert "checkpoint 3 is damaged (" in message
        assert "using step 2" in message
        assert f"kept as {tmp_path}/3.damaged" in message
        assert (tmp_path / "3.damaged" / "state").exists()
        assert checkpoints.save(3, state, {"step": "again"})  # the same step can be saved anew
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3]
        assert checkpoints.restore_meta(3) == {"step": "again"}
    shutil.rmtree(tmp_path / "3" / "meta")
    with Checkpoints(tmp_path, keep_last=10) as checkpoints:
        assert checkpoints.restore_latest(abstract(state)).step == 2
    assert (tmp_path / "3.damaged-2").exists()
    assert (tmp_path / "3.damaged").exists()


def test_every_flipped_byte_of_a_step_is_noticed_or_harmless(tmp_path):
    small = {"w": jnp.arange(6, dtype=jnp.float32)}
    step = fill(tmp_path, small, steps=[1]) / "1"
    files = [p for p in step.rglob("*") if p.is_file() and p.name != "commit_success.txt"]
    noticed = 0
    for path in files:
        original = path.read_bytes()
        for at in range(0, len(original), max(1, len(original) // 3)):
            flip(path, at)
            try:
                np.testing.assert_array_equal(
                    read_params(tmp_path, subtree="w", abstract=small["w"]), small["w"]
                )
            except CheckpointError:
                noticed += 1
            path.write_bytes(original)
    assert noticed > len(files)


def test_without_a_manifest_orbax_decides_whether_a_step_is_intact(tmp_path, state):
    fill(tmp_path, state)
    (tmp_path / "3" / MANIFEST).unlink()
    with Checkpoints(tmp_path, keep_last=10) as checkpoints:
        assert checkpoints.restore_latest(abstract(state)).step == 3
    shutil.rmtree(tmp_path / "3" / "state" / "ocdbt.process_0")
    with pytest.raises(CheckpointError, match="3 is damaged"):
        read_params(tmp_path / "3")
    with Checkpoints(tmp_path, keep_last=10) as checkpoints:
        assert checkpoints.restore_latest(abstract(state)).step == 2


def test_when_all_are_damaged_the_run_does_not_start_from_the_beginning(tmp_path, state):
    fill(tmp_path, state, steps=[1, 2])
    for step in (1, 2):
        truncate(tmp_path / str(step))
    for _ in range(2):  # nor when it is tried again
        with (
            Checkpoints(tmp_path, keep_last=1) as checkpoints,
            pytest.raises(CheckpointError, match=r"none in .* is intact \(2: .* bytes instead of") as error,
        ):
            checkpoints.restore_latest(abstract(state))
        assert "\n" not in str(error.value)
    (tmp_path / "1").rename(tmp_path / "1.damaged")
    shutil.rmtree(tmp_path / "2")
    with (
        Checkpoints(tmp_path, keep_last=1) as checkpoints,
        pytest.raises(CheckpointError, match=r"1\.damaged: set aside"),
    ):
        checkpoints.restore_latest(abstract(state))


def test_a_half_written_step_is_passed_over_with_a_message(tmp_path, state, caplog):
    fill(tmp_path, state, steps=[1, 2])
    half = tmp_path / "3.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "2" / "state", half / "state")
    with Checkpoints(tmp_path, keep_last=10) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.restore_latest(abstract(state)).step == 2
        assert "checkpoint 3 in" in caplog.text
        assert "half written; using step 2" in caplog.text
        assert not half.exists()
        checkpoints.save(3, state, {})
    assert read_params(tmp_path)["embed"].shape == (32, 16)


def test_the_last_the_best_and_the_chosen_steps_stay(tmp_path):
    state = {"w": jnp.zeros(3)}
    options = {"keep_last": 2, "keep_best_metric": "acc", "keep_steps": [3]}
    scores = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: float("nan")}
    with Checkpoints(tmp_path, **options) as checkpoints:
        assert checkpoints.best_step() is None
        for step, score in scores.items():
            checkpoints.save(step, state, {}, {"acc": score})
        checkpoints.save(6, state, {})
        assert checkpoints.best_step() == 2
        assert checkpoints.steps() == [2, 3, 5, 6]
    with Checkpoints(tmp_path, **options) as checkpoints:  # the metrics are remembered across processes
        assert checkpoints.best_step() == 2
        checkpoints.save(7, state, {}, {"acc": 1.0})
        checkpoints.wait()
        assert checkpoints.steps() == [3, 6, 7]
        assert checkpoints.best_step() == 7
    assert not list((tmp_path / "_deleted").iterdir())
    with Checkpoints(
        tmp_path / "min", keep_last=1, keep_best_metric="loss", keep_best_mode="min"
    ) as checkpoints:
        for step, loss in enumerate([3.0, 1.0, 2.0]):
            checkpoints.save(step, state, {}, {"loss": loss})
        assert checkpoints.best_step() == 1
        assert checkpoints.steps() == [1, 2]


def test_a_step_is_saved_once_and_never_overwritten(tmp_path):
    state = {"w": jnp.zeros(3)}
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        assert checkpoints.save(1, state, {"n": 1})
        assert not checkpoints.save(1, state, {"n": 2})
        assert checkpoints.save(2, state, {"n": 2})
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="is there already"):
            checkpoints.save(1, state, {})
        assert checkpoints.restore_meta(1) == {"n": 1}
        with pytest.raises(CheckpointError, match=r"no step 9 in .*there are \[1, 2\]"):
            checkpoints.restore(9, abstract(state))
        restored = checkpoints.restore(1, abstract(state))
        assert restored.meta == {"n": 1}
        assert not checkpoints.save(1, state, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.replace(critic=jax.eval_shape(lambda: network(1, width=24))),
            r"'critic/params/embed': expected float32\[32, 24\]",
        ),
        (
            lambda s: s.replace(actor=s.actor.replace(steps=jnp.int32(0))),
            r"'actor/steps': expected int32\[\]",
        ),
        (
            lambda s: {"actor": s.actor, "critic": s.critic},
            r"'key': the checkpoint has uint32\[2\], this run has",
        ),
        (
            lambda s: s.replace(key={"a": s.key}),
            r"'key/a': expected uint32\[2\], the checkpoint has no such leaf",
        ),
    ],
)
def test_another_state_is_an_error_that_names_the_leaf_and_not_damage(tmp_path, state, change, message):
    fill(tmp_path, state, steps=[1])
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        with pytest.raises(CheckpointMismatch, match=message) as error:
            checkpoints.restore_latest(change(state))
        assert "\n" not in str(error.value)
        assert checkpoints.steps() == [1]


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        with pytest.raises(TypeError, match=r"leaf 'a/b': .* got int"):
            checkpoints.save(1, {"a": {"b": 3}}, {})
        with pytest.raises(TypeError, match=r"leaf 'k': .*key<fry>"):
            checkpoints.save(1, {"k": jax.random.key(0)}, {})
        with pytest.raises(ValueError, match="leaf 'a/b': keys"):
            checkpoints.save(1, {"a/b": jnp.zeros(1)}, {})
        with pytest.raises(TypeError, match=r"meta\['a'\]\[1\]: expected a JSON value, got float32"):
            checkpoints.save(1, {"w": jnp.zeros(1)}, {"a": [1, np.float32(2)]})
        with pytest.raises(TypeError, match=r"meta: expected keys that are strings, got 1"):
            checkpoints.save(1, {"w": jnp.zeros(1)}, {1: 2})
        assert checkpoints.save(1, {"w": jnp.zeros(1)}, {})
    meta = {"a": [1, {"b": 2}]}
    assert _as_json(meta) == meta
    assert _as_json(meta)["a"][1] is not meta["a"][1]
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        Checkpoints(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="'max' or 'min', got 'best'"):
        Checkpoints(tmp_path, keep_last=1, keep_best_mode="best")


def test_a_part_of_a_state_is_read_alone(tmp_path, state):
    fill(tmp_path, state, steps=[1, 2])
    for path in (tmp_path, tmp_path / "2"):
        params = read_params(path)
        assert set(params) == {"embed", "layers"}
        assert isinstance(params["embed"], np.ndarray)
        np.testing.assert_array_equal(params["layers"]["kernel"], state.actor.params["layers"]["kernel"])
    sharding = NamedSharding(make_mesh({"fsdp": 8}), P())
    wanted = abstract(state.critic.params, sharding)
    params = read_params(tmp_path, wanted, subtree="critic/params")
    assert_identical(params, state.critic.params)
    assert params["embed"].sharding == sharding
    key = read_params(tmp_path, state.key, subtree="key")
    np.testing.assert_array_equal(key, state.key)
    with pytest.raises(
        CheckpointError, match=r"no 'policy/params' in 'state'; there are \['actor/opt_state'"
    ):
        read_params(tmp_path, subtree="policy/params")
    with pytest.raises(CheckpointMismatch, match=r"actor/params: leaf 'embed': expected float32\[32, 24\]"):
        read_params(tmp_path, jax.eval_shape(lambda: network(0, width=24)).params)
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        read_params(tmp_path / "nowhere")
    truncate(tmp_path / "2")
    np.testing.assert_array_equal(read_params(tmp_path)["embed"], state.actor.params["embed"])
    assert (tmp_path / "2").exists()  # reading renames nothing
    with pytest.raises(CheckpointError, match="no intact checkpoint here"):
        read_params(tmp_path / "2")


def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to .*file/run: Not a directory") as error:
        Checkpoints(tmp_path / "file" / "run", keep_last=1)
    assert "\n" not in str(error.value)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large; choose a directory"):
            Checkpoints(tmp_path, keep_last=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_save_that_fails_leaves_the_steps_before_and_the_next_one_works(tmp_path, caplog, capfd):
    rng = np.random.default_rng(0)
    small, large = {"w": jnp.zeros(3)}, {"w": jnp.asarray(rng.random(1 << 18, np.float32))}
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, small, {})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))  # stands for the disk that is full
    try:
        checkpoints.save(2, large, {})
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved .*untouched") as error:
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert "File too large" in str(error.value)
    assert checkpoints.steps() == [1]
    np.testing.assert_array_equal(checkpoints.restore(1, small).state["w"], small["w"])
    assert checkpoints.save(2, large, {})
    checkpoints.close()
    assert Checkpoints(tmp_path, keep_last=1).steps() == [2]
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


KILLED = """
import logging, sys, jax.numpy as jnp, numpy as np
from vcppo_jax.run.checkpoint import Checkpoints, read_params
logging.basicConfig(level=logging.INFO)
state = {"w": jnp.zeros(200_000), "n": jnp.uint32(0)}
with Checkpoints(sys.argv[1], keep_last=1) as checkpoints:
    found = checkpoints.restore_latest(state)
    step = 0
    if found is not None:
        step, state, meta = found
        assert meta == {"step": step}
        assert (np.asarray(state["w"]) == np.random.default_rng(step).random(200_000, np.float32)).all()
        assert read_params(sys.argv[1], subtree="n") == step
    print("start", step, flush=True)
    while True:
        step += 1
        state["w"] = jnp.asarray(np.random.default_rng(step).random(200_000, np.float32))
        state["n"] = jnp.uint32(step)
        checkpoints.save(step, state, {"step": step})
        print(step, flush=True)
"""


def test_sigkill_at_any_moment_leaves_a_state_to_resume_from(tmp_path):
    last_started = 0
    for delay in [0.05, 0.13]:
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": ""},
        )
        line = process.stdout.readline()
        assert line.startswith("start"), process.communicate()[1]
        assert int(line.split()[1]) >= last_started - 1  # at most the save that was running is lost
        for _ in range(3):
            last_started = int(process.stdout.readline())
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        last_started = int(out.split()[-1]) if out else last_started
        assert "absl" not in err  # Orbax does not chatter, although the root logger shows INFO
        assert "orbax" not in err
        assert "damaged" not in err
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        step, state, _ = checkpoints.restore_latest({"w": jnp.zeros(200_000), "n": jnp.uint32(0)})
    assert step >= last_started - 1 >= 4
    assert int(state["n"]) == step


def test_a_small_save_blocks_briefly(tmp_path):
    state = {f"w{i}": jnp.ones(5000, jnp.float32) for i in range(60)}  # 1.2 MB
    blocked = []
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in range(6):
            start = time.perf_counter()
            checkpoints.save(step, state, {"step": step})
            blocked.append(time.perf_counter() - start)
            checkpoints.wait()
    assert min(blocked) < 0.1
