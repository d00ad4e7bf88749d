"""Eight virtual CPU devices for the whole suite, quick compiling, and no network."""

import atexit
import os
import shutil
import signal
import tempfile

import jaxlib.version
import pytest

# The suite spends its time in compiling, not in running what was compiled: ask for quick compiling, and keep
# every program for the tests, and the processes they start, that need it again.
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if jaxlib.version.__version_info__ < (0, 11):
    # Fusions without MLIR: an update compiles in 1.5 s, not 5. Later XLA ends the process at this flag.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit all this
    programs = tempfile.mkdtemp(prefix="vcppo_tests_")
    atexit.register(shutil.rmtree, programs, ignore_errors=True)
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell that starts the tests in the background has Ctrl-C ignored; some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARE_A_RUN = ("test_phases", "test_resume")
LONGEST_FIRST = (
    *("test_notebooks", "test_phases", "test_resume", "test_presets", "test_train_updates"),
    *("test_train_sharding", "test_rollout_engine", "test_reward_model", "test_study", "test_scoring"),
)
"""So that no worker is left with a long file at the end."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """A file's tests run in one worker, for they share fixtures; files that share a run, too."""
    name = item.path.stem
    item.add_marker(pytest.mark.xdist_group("runs" if name in SHARE_A_RUN else name))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
