"""Shared fixtures: the choice of the driver, the simulator's controls, and child processes.

The library has one state for each process. Most tests run in this process on the simulated driver
with their own tags. The fixture `sim` checks that the tests leave nothing behind. Tests that need a
new process (for its environment, fork, exit, or several devices) use a child process through
`run_python`.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import coroutine_tests
import pytest
from child_process import environment_without, reads_at_start, run_code
from driver_choice import GPUS, asks_for_gpu_tests, why_not
from dropin_environment import make_site, run_with, wheel_in
from folder_modules import modules_in
from garbage import collect_garbage
from repository import IMPORT_PATH, ROOT, TESTS
from simulated_driver import Block, Simulator
from tags import Tags, leftovers
from tasks import Task

BENCHMARKS = ROOT / "benchmarks"
PEER = TESTS / "fixtures" / "peer"


# --- which driver ---------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(coroutine_tests)
    gc.disable()  # until all tests are collected, which creates only permanent objects
    expression = config.getoption("markexpr") or ""
    config.real_driver = bool(GPUS) and asks_for_gpu_tests(expression)
    config.soak = "soak" in re.findall(r"\w+", expression)
    for name in [name for name in os.environ if name.startswith(("MEMSAVER_", "PYTHON"))]:
        if name not in ("MEMSAVER_WERROR", "PYTHONPATH"):
            del os.environ[name]
    # Python 3.12 and newer warn about a fork in a process with threads, which tests do on purpose.
    os.environ["PYTHONWARNINGS"] = "ignore:This process:DeprecationWarning"
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):  # each makes typer use colours
        os.environ.pop(name, None)
    if not config.real_driver:
        os.environ["MEMSAVER_DRIVER"] = "sim"
    # Threads of torch that wait spin, and take the processors from other test processes.
    os.environ["OMP_NUM_THREADS"] = "1"
    # A shell starts background processes with these signals ignored, and children inherit that.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # The folder of watched processes' sockets, so that tests do not use the user's folder.
    config.runtime_folder = tempfile.TemporaryDirectory(prefix="memsaver-runtime-")
    os.environ["XDG_RUNTIME_DIR"] = config.runtime_folder.name


def pytest_unconfigure(config: pytest.Config) -> None:
    config.runtime_folder.cleanup()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        reason = why_not(config, item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    # To each logger that does not propagate, pytest adds its handlers in each test; torch has 40.
    for logger in map(logging.getLogger, list(logging.root.manager.loggerDict)):
        logger.propagate = logger.propagate or logger.name.startswith("torch")
    gc.enable()
    gc.freeze()


# --- the simulator --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def simulator_library():
    return Simulator()


@pytest.fixture
def sim(simulator_library, tag):
    """Yield the simulator; after the test, check for leaks and for violations of the driver's
    rules.
    """
    import memsaver
    from memsaver._runtime.native import _C

    sim = simulator_library
    sim.reset()
    memsaver.device_memory(0)  # allocates the library's memory for the device
    collect_garbage()
    memsaver.trim(wait=True)
    before = sim.counts()
    resident = 0  # of other tags, whose memory is mapped, unlike the library's own
    if before.mappings:
        resident = sum(row["resident_bytes"] for row in _C.stats() if row["device"] == 0)
    sim.idle = {0: sim.physical(0) - resident}
    yield sim
    sim.reset()
    gc.collect()
    violations = sim.violations()
    sim.clear_violations()
    left = leftovers(tag.names)
    if left and gc.collect():  # torch's compiled code holds tensors until its guards are collected
        left = leftovers(tag.names)
    sim.clear_faults()
    memsaver.trim(wait=True)  # releases the memory kept for the next fingerprints
    after = sim.counts()
    assert not violations
    assert not left
    for name in ("handles", "mappings", "allocations", "registered_bytes", "pinned_bytes"):
        assert getattr(after, name) <= getattr(before, name), f"{name} were left"
    assert after.physical_bytes[0] <= before.physical_bytes[0]


@pytest.fixture
def tag(request):
    """Return a function that creates unique tag names for this test: `tag("weights")`."""
    return Tags(request.node.name)


@pytest.fixture
def make_blocks(sim):
    """Return a function that creates blocks in a tag: `make_blocks(tag, [sizes],
    backup="host")`.
    """
    import memsaver

    seeds = iter(range(1, 1 << 30))

    def make(tag: str, sizes: list[int], backup: str | None = None, device: int = 0) -> list[Block]:
        with memsaver.region(tag, backup=backup):
            return [Block(sim, nbytes, next(seeds), device) for nbytes in sizes]

    return make


@pytest.fixture
def each_fault(sim, in_thread):
    """See `driver_faults.each_fault`."""
    from driver_faults import each_fault

    return functools.partial(each_fault, sim, in_thread)


@pytest.fixture
def memory(sim, tag):
    """Yield a tag's memory with known bytes: three fingerprint pieces and part of a fourth."""
    from fingerprint_memory import Memory

    import memsaver

    with memsaver.region(tag()):
        made = Memory(sim, (3 << 20) + 4096)
    yield made
    del made.buffer


@pytest.fixture
def registered():
    """Collect callback registrations that are removed after the test: `registered +=
    [memsaver.on_pause(f)]`.
    """
    found: list[Any] = []
    yield found
    for registration in found:
        registration.remove()
    found.clear()  # pytest keeps the list, which would keep the callbacks' objects


@pytest.fixture
def make_paused(make_blocks):
    """Create a paused tag and return its blocks."""
    import memsaver

    def make(
        name: str, sizes: Sequence[int] = (2 << 20,), backup: str | None = "host"
    ) -> list[Block]:
        blocks = make_blocks(name, list(sizes), backup=backup)
        memsaver.pause(name)
        return blocks

    return make


@pytest.fixture
def slow(sim):
    """Delay every copy, so that a pause or resume takes at least this delay."""

    def set_delay(seconds=0.15):
        sim.stream_delay(seconds)

    yield set_delay
    sim.stream_delay(0)


@pytest.fixture
def options():
    """Set options for the duration of the test: `options(share_bytes="2MiB")`."""
    import memsaver
    from memsaver._runtime.native import _C

    before: dict[str, str] = {}

    def configure(**values: int | str) -> None:
        for name in values:
            before.setdefault(name, _C.option(name))
        memsaver.configure(**values)

    yield configure
    memsaver.configure(**before)


# --- threads --------------------------------------------------------------------------------------


@pytest.fixture
def in_thread():
    """Run a call on another thread: `in_thread(function, ...).result()`."""
    return Task


@pytest.fixture
def wait_until():
    def wait(condition, timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.0005)

    return wait


# --- memsaver doctor ------------------------------------------------------------------------------


@pytest.fixture
def plain(monkeypatch):
    """Remove the environment variables that the checks read; return the monkeypatch fixture."""
    prefixes = ("MEMSAVER_", "NCCL_", "PYTORCH_", "SGLANG_", "LD_", "TMPDIR", "TORCH_", "CUDA_")
    for name in list(os.environ):
        if name.startswith(prefixes) and name not in ("MEMSAVER_DRIVER", "LD_LIBRARY_PATH"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_CONF_FILE", "/nonexistent")
    return monkeypatch


# --- traces ---------------------------------------------------------------------------------------


@pytest.fixture
def recorded(sim, tag, make_blocks):
    """Return a timeline with a pause, a failed resume and a swap, and its two tags."""
    import memsaver

    first, second = tag("weights"), tag("kv_cache")
    with memsaver.timeline() as t:
        blocks = make_blocks(first, [4 << 20, 6 << 20], backup="host")
        memsaver.pause(first)
        blocks += make_blocks(second, [8 << 20])
        with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY, times=0):
            with pytest.raises(memsaver.OutOfDeviceMemoryError):
                memsaver.resume(first)
        memsaver.swap(out=second, into=first)
    assert len(blocks) == 3
    return t, first, second


# --- child processes ------------------------------------------------------------------------------


def depends_on_interpreter(request: pytest.FixtureRequest) -> bool:
    """Return whether the test is marked `each_python` and therefore needs new interpreters."""
    return request.node.get_closest_marker("each_python") is not None


@pytest.fixture
def run_python(tmp_path, request):
    """Run code in a new process: `run_python(code, MEMSAVER_SIM_DEVICES=2)`.

    Returns a CompletedProcess. The environment is a copy of this process's environment, with the
    simulated driver and without memsaver's variables. A variable whose value is None is not set.
    See `run_code` for `with_torch`, `with_memsaver` and `fresh`. Tests marked each_python use a new
    interpreter unless they pass `fresh=False`.
    """
    from memsaver._runtime.native import LIBRARY_DIR

    each_python = depends_on_interpreter(request)

    def run(
        code: str,
        *,
        status: int | None = 0,
        timeout: float = 60,
        with_torch=False,
        with_memsaver=False,
        fresh: bool | None = None,
        **env,
    ):
        fresh = each_python if fresh is None else fresh
        environment = environment_without("MEMSAVER_")
        paths = [IMPORT_PATH, str(LIBRARY_DIR.parent)]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
        environment["MEMSAVER_DRIVER"] = "sim"
        for name, value in env.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = str(value)
        return run_code(
            code,
            environment,
            tmp_path,
            status=status,
            timeout=timeout,
            with_torch=with_torch,
            with_memsaver=with_memsaver,
            fresh=fresh or reads_at_start(env),
        )

    return run


# --- watched processes ----------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """Create the folder of this test's sockets, which is the only folder that `memsaver top`
    searches.
    """
    from memsaver.cli import watched

    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(watched, "FALLBACK", str(tmp_path / "nobody"))
    return folder


# --- integrations/torch_memory_saver --------------------------------------------------------------


@pytest.fixture(scope="session")
def dropin_wheel(tmp_path_factory):
    """Build the distribution's wheel with pip, once for all processes of a test run."""
    folder = tmp_path_factory.getbasetemp()
    return wheel_in((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "wheel")


@pytest.fixture(scope="session")
def dropin_site(dropin_wheel, tmp_path_factory):
    """Create a site-packages folder with memsaver and the wheel's contents."""
    return make_site(dropin_wheel, tmp_path_factory.mktemp("site"))


@pytest.fixture
def run_dropin(dropin_site, tmp_path, request):
    """Run Python code after the usual import; check the exit status and return the completed
    process.
    """
    each_python = depends_on_interpreter(request)

    def go(code, *, status=0, packages=dropin_site, **options):
        return run_with(packages, code, tmp_path, status, fresh=each_python, **options)

    return go


# --- benchmarks -----------------------------------------------------------------------------------


@pytest.fixture
def benchmark_module(monkeypatch):
    """Import a module of the benchmarks, and a fake of a compared library, for this test."""
    yield from modules_in(monkeypatch, BENCHMARKS, PEER)


@pytest.fixture
def tensors_in_files():
    """Make torch send tensors through named files, which more than one rank can open."""
    from torch import multiprocessing

    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    yield
    multiprocessing.set_sharing_strategy(before)
