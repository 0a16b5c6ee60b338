"""What the tests share: the choice of the driver, the simulator's controls, child processes.

The library's state belongs to the process. Most tests run in this process on the simulated driver,
with tags of their own, and the fixture `sim` checks that nothing of theirs is left. What needs a
fresh process (environment, fork, exit, several devices) runs in a child, by `run_python`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

MIB = 1 << 20
ROOT = Path(__file__).parent.parent


# --- which driver ---------------------------------------------------------------------------------


def count_gpus() -> int:
    """The GPUs that the real driver offers; 0 without one. Starts no context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


GPUS = count_gpus()


def asks_for_gpu_tests(expression: str) -> bool:
    """Whether `-m expression` selects tests marked gpu and leaves out ordinary ones."""
    if not expression:
        return False
    words = set(re.findall(r"[A-Za-z_]\w*", expression)) - {"and", "or", "not"}
    kinds = [{"gpu", *more} for more in [(), ("two_gpus",), ("sglang",), ("soak",)]]

    def selects(marks: set[str]) -> bool:
        return bool(eval(expression, {"__builtins__": {}}, {word: word in marks for word in words}))

    try:
        return any(map(selects, kinds)) and not selects(set())
    except Exception:
        return False


def pytest_configure(config: pytest.Config) -> None:
    expression = config.getoption("markexpr") or ""
    config.real_driver = bool(GPUS) and asks_for_gpu_tests(expression)
    config.soak = "soak" in re.findall(r"\w+", expression)
    for name in [name for name in os.environ if name.startswith("MEMSAVER_")]:
        if name != "MEMSAVER_WERROR":
            del os.environ[name]
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):  # typer colours by any of them
        os.environ.pop(name, None)
    if not config.real_driver:
        os.environ["MEMSAVER_DRIVER"] = "sim"
    # Where processes leave the sockets by which they are watched: none of the user's.
    config.runtime_folder = tempfile.TemporaryDirectory(prefix="memsaver-runtime-")
    os.environ["XDG_RUNTIME_DIR"] = config.runtime_folder.name


def pytest_unconfigure(config: pytest.Config) -> None:
    config.runtime_folder.cleanup()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        reason = _why_not(config, item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(config: pytest.Config, item: pytest.Item) -> str | None:
    marked = item.get_closest_marker
    if (marked("gpu") or marked("two_gpus")) and GPUS == 0:
        return "no NVIDIA GPU: libcuda.so.1 cannot be opened, or finds none"
    if marked("two_gpus") and GPUS < 2:
        return "there is only one NVIDIA GPU"
    opens_its_own = "conformance" in item.path.parts
    if (marked("gpu") or marked("two_gpus")) and not (config.real_driver or opens_its_own):
        return "this run is on the simulated driver; choose GPU tests with -m gpu"
    on_the_simulator = "sim" in getattr(item, "fixturenames", ()) and not opens_its_own
    if config.real_driver and on_the_simulator:
        return "this run is on the real driver"
    if marked("sglang") and find_spec("sglang") is None:
        return "SGLang is not installed"
    if marked("soak") and not config.soak:
        return "runs for minutes; choose it with -m soak"
    return None


# --- the simulator --------------------------------------------------------------------------------


class Totals(ctypes.Structure):
    """struct sim_totals of csrc/sim/sim.h."""

    _order = (
        "handles mappings reservations reserved_bytes allocations pinned_bytes registered_bytes "
        "streams events graphs modules captures retained_contexts queued_operations violations "
        "illegal_accesses devices"
    )
    _names = tuple(_order.split())
    _fields_ = [(name, ctypes.c_uint64) for name in _names] + [
        ("physical_bytes", ctypes.c_uint64 * 16)
    ]


class Simulator:
    """The simulated driver: its controls, what it holds, and safe access to its memory."""

    OUT_OF_MEMORY = 2
    INVALID_VALUE = 1
    LAUNCH_FAILED = 719

    def __init__(self) -> None:
        from memsaver.native import LIBRARY_DIR

        self.opened = ctypes.CDLL(str(LIBRARY_DIR / "libmemsaver_sim.so"))
        u64, text, pointer = ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p
        for name, result, arguments in (
            ("sim_fail", ctypes.c_int, [text, u64, ctypes.c_int, u64]),
            ("sim_calls", u64, [text]),
            ("sim_counts", ctypes.c_int, [ctypes.POINTER(Totals)]),
            ("sim_violation", ctypes.c_int, [u64, text, ctypes.c_size_t]),
            ("sim_occupy", ctypes.c_int, [ctypes.c_int, u64]),
            ("sim_host_limit", None, [u64]),
            ("sim_stream_delay", None, [u64]),
            ("sim_copy_rate", None, [u64]),
        ):
            function = getattr(self.opened, name)
            function.restype, function.argtypes = result, arguments
        self.opened.cuMemsetD8Async.argtypes = [u64, ctypes.c_ubyte, ctypes.c_size_t, pointer]
        self.opened.cuStreamSynchronize.argtypes = [pointer]
        self.opened.cuStreamDestroy_v2.argtypes = [pointer]
        self.opened.cuCtxPushCurrent_v2.argtypes = [pointer]
        self.opened.cuStreamBeginCapture_v2.argtypes = [pointer, ctypes.c_int]
        self.opened.cuStreamEndCapture.argtypes = [pointer, pointer]
        self.opened.cuGraphDestroy.argtypes = [pointer]
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - for the session
        self.idle: dict[int, int] = {}

    # What it does.

    def fail(self, call: str, code: int, nth: int = 1, times: int = 1) -> None:
        """Fail the nth coming call of that name, and times - 1 after it; times 0: all."""
        assert self.opened.sim_fail(call.encode(), nth, code, times) == 0, f"no call {call}"

    def clear_faults(self) -> None:
        self.opened.sim_clear_faults()

    @contextlib.contextmanager
    def fault(self, call: str, code: int = 1, nth: int = 1, times: int = 1):
        self.fail(call, code, nth, times)
        try:
            yield
        finally:
            self.clear_faults()

    def calls(self, call: str) -> int:
        return self.opened.sim_calls(call.encode())

    def occupy(self, nbytes: int, device: int = 0) -> None:
        """Memory that another process holds."""
        assert self.opened.sim_occupy(device, nbytes) == 0

    def host_limit(self, nbytes: int = (1 << 64) - 1) -> None:
        self.opened.sim_host_limit(nbytes)

    def stream_delay(self, seconds: float) -> None:
        """Every copy and set waits this long before it starts."""
        self.opened.sim_stream_delay(int(seconds * 1e6))

    def copy_rate(self, bytes_per_second: int) -> None:
        self.opened.sim_copy_rate(bytes_per_second)

    def hold_streams(self, held: bool) -> None:
        """While held, no stream starts another operation."""
        self.opened.sim_hold_streams(int(held))

    def deinitialize(self, gone: bool) -> None:
        self.opened.sim_deinitialize(int(gone))

    def reset(self) -> None:
        self.clear_faults()
        self.hold_streams(False)
        self.stream_delay(0)
        self.copy_rate(0)
        self.host_limit()
        self.deinitialize(False)
        if self.counts().devices:
            self.occupy(0)

    # What it holds.

    def counts(self) -> Totals:
        totals = Totals()
        self.opened.sim_counts(ctypes.byref(totals))
        return totals

    def physical(self, device: int = 0) -> int:
        """Device memory in use, as the driver counts it."""
        return self.counts().physical_bytes[device]

    def tag_bytes(self, device: int = 0) -> int:
        """The part of it that is not the library's own: what tags hold, if all is well."""
        return self.physical(device) - self.idle[device]

    def start(self, device: int = 0) -> int:
        """In a child: make the library start a device; what it keeps there is not the tags'."""
        import memsaver

        memsaver.device_memory(device)
        self.idle[device] = self.physical(device)
        return self.idle[device]

    def violations(self) -> list[str]:
        """Memory taken away from work in flight, and accesses to memory that was not there."""
        found, buffer = [], ctypes.create_string_buffer(500)
        while self.opened.sim_violation(len(found), buffer, 500) >= 0:
            found.append(buffer.value.decode())
        return found

    def clear_violations(self) -> None:
        self.opened.sim_clear_violations()

    # Its memory, through system calls: what has no memory behind it is an error, not a crash.

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes there; an AssertionError where the memory is not accessible."""
        source = (ctypes.c_char * nbytes).from_address(address)
        try:
            done = os.pwrite(self._file.fileno(), source, 0)
        except OSError as error:
            raise AssertionError(f"no memory at {address:#x}: {error}") from None
        assert done == nbytes, f"no memory at {address + done:#x}"
        return os.pread(self._file.fileno(), nbytes, 0)

    def write(self, address: int, data: bytes) -> None:
        """Put bytes there; an AssertionError where the memory is not accessible."""
        os.pwrite(self._file.fileno(), data, 0)
        target = (ctypes.c_char * len(data)).from_address(address)
        try:
            done = os.preadv(self._file.fileno(), [target], 0)
        except OSError as error:
            raise AssertionError(f"no memory at {address:#x}: {error}") from None
        assert done == len(data), f"no memory at {address + done:#x}"

    def accessible(self, address: int, nbytes: int = 1) -> bool:
        try:
            self.read(address, nbytes)
        except AssertionError:
            return False
        return True

    # Work of the program's own.

    @contextlib.contextmanager
    def stream(self, device: int = 0):
        """A stream that the program made, with its context current on this thread."""
        library, context, stream = self.opened, ctypes.c_void_p(), ctypes.c_void_p()
        assert library.cuInit(0) == 0
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert library.cuCtxPushCurrent_v2(context) == 0
        assert library.cuStreamCreate(ctypes.byref(stream), 1) == 0
        try:
            yield stream
        finally:
            library.cuStreamSynchronize(stream)
            library.cuStreamDestroy_v2(stream)
            library.cuCtxPopCurrent_v2(ctypes.byref(context))
            library.cuDevicePrimaryCtxRelease_v2(device)

    def memset(self, address: int, value: int, nbytes: int, stream) -> None:
        """Queue a fill on a stream."""
        assert self.opened.cuMemsetD8Async(address, value, nbytes, stream) == 0


@pytest.fixture(scope="session")
def simulator_library():
    return Simulator()


@pytest.fixture
def sim(simulator_library, tag):
    """The simulator. Afterwards nothing of the test may be left, and no rule of a driver broken."""
    import memsaver

    sim = simulator_library
    sim.reset()
    memsaver.device_memory(0)  # what the library keeps per device, it has from here on
    gc.collect()
    memsaver.trim(wait=True)
    before = sim.counts()
    sim.idle = {0: sim.physical(0) - memsaver.stats().resident_bytes}
    yield sim
    sim.reset()
    gc.collect()
    violations = sim.violations()
    sim.clear_violations()
    leftovers = _leftovers(tag.names)
    sim.clear_faults()
    memsaver.trim(wait=True)  # what is kept for the next fingerprints
    after = sim.counts()
    assert not violations
    assert not leftovers
    for name in ("handles", "mappings", "allocations", "registered_bytes", "pinned_bytes"):
        assert getattr(after, name) <= getattr(before, name), f"{name} were left"
    assert after.physical_bytes[0] <= before.physical_bytes[0]


def _leftovers(names: list[str]) -> list[str]:
    """Resumes the tags, gives back their host memory, and says what they still hold."""
    import memsaver

    mine = set(names)
    for row in memsaver.stats().tags:
        if row.tag in mine and row.state != memsaver.State.MAPPED:
            memsaver.resume(row.tag)
    memsaver.trim(wait=True)
    return [
        f"{row.tag}: {row.allocations} allocations, {row.resident_bytes} resident, "
        f"{row.host_bytes} pinned"
        for row in memsaver.stats().tags
        if row.tag in mine and (row.allocations or row.resident_bytes or row.host_bytes)
    ]


class Tags:
    """Makes names that no other test uses."""

    _made = 0

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.names: list[str] = []

    def __call__(self, name: str = "tag") -> str:
        Tags._made += 1
        self.names.append(f"{name}-{self.prefix}-{Tags._made}"[:100])
        return self.names[-1]


@pytest.fixture
def tag(request):
    """Makes tag names of this test's own: `tag("weights")`."""
    return Tags(request.node.name)


class Block:
    """Simulated device memory with known random contents."""

    def __init__(self, sim: Simulator, nbytes: int, seed: int, device: int = 0) -> None:
        from memsaver import simulator

        self.sim = sim
        self.buffer = simulator.buffer(nbytes, device)
        self.address = self.buffer.address
        self.nbytes = nbytes
        self.fill(seed)

    def fill(self, seed: int) -> None:
        self.seed = seed
        self.sim.write(self.address, self.expected())

    def expected(self) -> bytes:
        return random.Random(self.seed).randbytes(self.nbytes)

    def bytes(self) -> bytes:
        return self.sim.read(self.address, self.nbytes)

    def is_intact(self) -> bool:
        return self.bytes() == self.expected()

    def is_zero(self) -> bool:
        return self.bytes().count(0) == self.nbytes


@pytest.fixture
def make_blocks(sim):
    """Makes blocks in a tag: `make_blocks(tag, [sizes], backup="host")`."""
    import memsaver

    seeds = iter(range(1, 1 << 30))

    def make(tag: str, sizes: list[int], backup: str | None = None, device: int = 0) -> list[Block]:
        with memsaver.region(tag, backup=backup):
            return [Block(sim, nbytes, next(seeds), device) for nbytes in sizes]

    return make


@pytest.fixture
def options():
    """Sets options for the test: `options(share_bytes="2MiB")`."""
    import memsaver
    from memsaver.native import _C

    before: dict[str, str] = {}

    def configure(**values: int | str) -> None:
        for name in values:
            before.setdefault(name, _C.option(name))
        memsaver.configure(**values)

    yield configure
    memsaver.configure(**before)


# --- threads --------------------------------------------------------------------------------------


class Task(threading.Thread):
    """A call on another thread, whose result or exception `join()` hands over."""

    def __init__(self, function, *arguments, **named) -> None:
        super().__init__(daemon=True)
        self._call = lambda: function(*arguments, **named)
        self._result = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def result(self, timeout: float = 60):
        """What the call returned; raises what it raised."""
        self.join(timeout)
        assert not self.is_alive(), "the thread is stuck"
        if self._error is not None:
            raise self._error
        return self._result


@pytest.fixture
def in_thread():
    """Runs a call on another thread: `in_thread(function, ...).result()`."""
    return Task


@pytest.fixture
def wait_until():
    def wait(condition, timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.0005)

    return wait


# --- child processes ------------------------------------------------------------------------------


@pytest.fixture
def run_python(tmp_path):
    """Runs code in a fresh process: `run_python(code, MEMSAVER_SIM_DEVICES=2)`.

    Gives a CompletedProcess. The environment is this one without memsaver's variables, with the
    simulated driver; a variable given as None is not set.
    """
    from memsaver.native import LIBRARY_DIR

    def run(code: str, *, status: int | None = 0, timeout: float = 60, **env):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
        paths = [str(Path(__file__).parent), str(LIBRARY_DIR.parent)]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
        environment["MEMSAVER_DRIVER"] = "sim"
        for name, value in env.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = str(value)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if status is not None:
            assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


# --- watched processes ----------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The folder of this test's sockets, which those who look, look into."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


# --- integrations/torch_memory_saver --------------------------------------------------------------


@pytest.fixture(scope="session")
def dropin_wheel(tmp_path_factory):
    """The wheel of the distribution, built as pip builds it."""
    folder = tmp_path_factory.mktemp("dropin")
    leftovers = shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__")
    source = ROOT / "integrations" / "torch_memory_saver"
    shutil.copytree(source, folder / "source", ignore=leftovers)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [*command, "--disable-pip-version-check", "-w", str(folder), str(folder / "source")],
        check=True,
        timeout=110,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def dropin_site(dropin_wheel):
    """A folder of packages with memsaver and the wheel's contents in it."""
    from memsaver.native import LIBRARY_DIR

    folder = dropin_wheel.parent / "site"
    with zipfile.ZipFile(dropin_wheel) as archive:
        archive.extractall(folder)
    (folder / "memsaver").symlink_to(LIBRARY_DIR)
    return folder


@pytest.fixture
def run_dropin(dropin_site, tmp_path):
    """Runs Python code after the usual import; gives its CompletedProcess, status checked."""

    fixtures = ROOT / "tests" / "fixtures" / "preload"

    def go(code, *, status=0, packages=dropin_site, **env):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MEMSAVER_", "TMS_")) and name != "LD_PRELOAD"
        }
        paths = [str(packages), str(fixtures), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["MEMSAVER_DRIVER"] = "sim"
        environment.update(env)
        done = subprocess.run(
            [sys.executable, "-c", DROPIN_PREAMBLE + textwrap.dedent(code)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return go


DROPIN_PREAMBLE = """
import os, subprocess, sys
import memsaver
from memsaver import simulator
from torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver as saver

MIB = 1 << 20

def block(byte, nbytes=3 * MIB):
    made = simulator.buffer(nbytes)
    made.array[:] = bytes([byte]) * nbytes
    return made

def reads(made, byte):
    return bytes(made.array) == bytes([byte]) * made.nbytes

def raises(kind, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")

def enter(context):
    with context:
        pass

def used():
    free, total = memsaver.device_memory(0)
    return total - free
"""
