"""Loading a checkpoint that no process could hold: each reads its own slices; its peak memory is measured.

`python tests/test_hf_memory.py PROCESSES LAYERS` prints the numbers of docs/scaling.md.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from vcppo_jax.models.config import model_config
from vcppo_jax.models.hf_load import hf_shape, hf_tensors, spec_leaves
from vcppo_jax.models.specs import weight_specs

MIB = 2**20
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def write_checkpoint(directory: Path, layers: int) -> None:
    """A bfloat16 checkpoint, a file per weight; element i of a tensor is i modulo 251."""
    config = CONFIG | {"num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for spec in spec_leaves(weight_specs(model_config(config), head="lm")):
        shape = hf_shape(spec)
        tensor = np.resize(np.arange(251, dtype=ml_dtypes.bfloat16), shape)
        file = f"model-{len(set(weight_map.values()))}.safetensors"
        weight_map |= {name: file for name, _ in hf_tensors(spec)}
        save_file({name: tensor for name, _ in hf_tensors(spec)}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def own_memory() -> int:
    """Bytes of this process that are no pages of files: those the kernel can drop, and reads again."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: no RssAnon")


def load_and_measure(directory: str, address: str, index: int, count: int) -> dict:
    """In a process of its own, one of `count`: what it holds of the model, and its peak while it loaded."""
    import jax

    from vcppo_jax.models.hf_load import load_policy
    from vcppo_jax.sharding import make_mesh

    jax.distributed.initialize(address, count, index)
    mesh = make_mesh({"fsdp": count})
    before, peak, stop = own_memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, own_memory())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    started = time.monotonic()
    params = load_policy(directory, mesh=mesh).params
    seconds = time.monotonic() - started
    stop.set()
    thread.join()
    gate = params["layers"]["gate"]["kernel"]
    (shard,) = gate.addressable_shards
    # Stored [out, in]: element (out, in) is (out * inputs + in) modulo 251.
    rows = np.arange(gate.shape[1])[shard.index[1]]
    expected = (np.arange(gate.shape[2])[None, :] * gate.shape[1] + rows[:, None]) % 251
    leaves = jax.tree.leaves(params)
    return {
        "right": bool(np.array_equal(shard.data[-1], expected)),
        "model": sum(leaf.nbytes for leaf in leaves),
        "held": sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
        "largest": max(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
        "peak": peak - before,
        "seconds": seconds,
    }


def measure(directory: Path, processes: int) -> list[dict]:
    """What `load_and_measure` gives in each of as many processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    here = [sys.executable, __file__, "--one", str(directory), address]
    started = [
        subprocess.Popen([*here, str(i), str(processes)], stdout=subprocess.PIPE, env=environment)
        for i in range(processes)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux to measure memory")
def test_a_process_reads_its_own_slices_and_holds_no_more(tmp_path):
    write_checkpoint(tmp_path, layers=4)
    for numbers in measure(tmp_path, 2):
        assert numbers["right"]
        assert numbers["held"] < 0.51 * numbers["model"]
        # Its own half, and twice the weight that is read: as NumPy array, and what JAX and the file have.
        assert numbers["peak"] < numbers["held"] + 2 * numbers["largest"], numbers
        assert numbers["peak"] < 0.75 * numbers["model"]


def main(processes: int, layers: int) -> None:
    """Print one line per process, in MiB."""
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), layers)
        size = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
        print(f"checkpoint {size / MIB:.0f} MiB")
        for numbers in measure(Path(directory), processes):
            print({key: round(x / MIB) if key in ("model", "held", "largest", "peak") else x
                   for key, x in numbers.items()})  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(load_and_measure(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
