"""Eight virtual CPU devices for the whole suite, quick compiling, and no network."""

import atexit
import os
import shutil
import tempfile

import pytest

# The suite spends its time in compiling, not in running what was compiled: ask for quick compiling, and keep
# every program for the tests, and the processes they start, that need it again.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit all this
    programs = tempfile.mkdtemp(prefix="vcppo_tests_")
    atexit.register(shutil.rmtree, programs, ignore_errors=True)
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARE_A_RUN = ("test_phases", "test_resume")


def pytest_itemcollected(item: pytest.Item) -> None:
    """A file's tests run in one worker, for they share fixtures; files that share a run, too."""
    name = item.path.stem
    item.add_marker(pytest.mark.xdist_group("runs" if name in SHARE_A_RUN else name))
