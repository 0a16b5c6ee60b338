"""Tests `memsaver demo` on the simulated driver: the output, and checks that can fail."""

import io
import os
import shutil
import signal
import subprocess
import threading

import pytest
from repository import ROOT
from rich.console import Console

import memsaver
from memsaver.cli import demo


@pytest.fixture
def run_demo(run_python):
    """Run the command in a separate process: `run_demo(COLUMNS=80)`."""

    def run(*, status=0, **env):
        script = "from memsaver.cli.app import app; app(['demo'], prog_name='memsaver')"
        return run_python(script, status=status, timeout=100, **env)

    return run


# One run takes seconds, so these two serve several tests. In the narrow run, no driver is set and
# no GPU is visible, so the demo chooses the simulated driver itself.
RUNS = {80: {"MEMSAVER_DRIVER": None, "CUDA_VISIBLE_DEVICES": ""}, 140: {}}
_done = {}


@pytest.fixture
def finished_demo(run_demo):
    def run(columns):
        if columns not in _done:
            _done[columns] = run_demo(COLUMNS=columns, **RUNS[columns])
        return _done[columns]

    return run


@pytest.mark.parametrize("columns", [pytest.param(80, marks=pytest.mark.long), 140])
def test_the_demo_passes_every_check(finished_demo, columns):
    done = finished_demo(columns)
    text = done.stdout
    assert done.stderr == ""
    assert text.rstrip().endswith("every check passed")
    assert text.count("✓") == 9 and "✗" not in text
    assert max(len(line) for line in text.splitlines()) <= columns
    flat = " ".join(text.split())
    assert f"memsaver {memsaver.__version__} on the simulated driver" in flat
    assert "It cannot show kernels, CUDA graphs" in flat and "the times are this CPU's" in flat
    for step in ("pause the engine (1)", "resume weights", "resume the rest", "a trainer uses"):
        assert step in flat
    assert "100.0 % of its bytes free" in flat
    assert "41 addresses, same output" in flat
    assert "…" not in text, "something was cut"


def test_the_numbers_are_the_drivers(finished_demo):
    lines = finished_demo(140).stdout.splitlines()
    rows = {}
    for line in lines:
        for step in (
            "build the engine",
            "pause the engine (1)",
            "resume weights",
            "resume the rest",
        ):
            if line.strip().startswith(step):
                rows[step] = [cell.replace(",", "") for cell in line[len(step) :].split()][-4:]
    free = 80 * 1024
    assert rows["pause the engine (1)"][:3] == ["0", "0", "0"]
    assert rows["resume weights"][:3] == ["128", "0", "0"]
    assert rows["resume the rest"][:3] == ["128", "256", "32"]
    for cells in rows.values():
        assert free - 4 <= sum(map(int, cells)) <= free  # except the library's own blocks


@pytest.mark.parametrize(
    "env, status, says, begins",
    [
        ({"MEMSAVER_DRIVER": "/nonexistent.so"}, 1, "/nonexistent.so", False),
        ({"MEMSAVER_SIM_MEMORY": "256MiB"}, 1, "CUDA out of memory", True),
        ({"MEMSAVER_HOST_BYTES": "many"}, 2, "MEMSAVER_HOST_BYTES", True),
    ],
)
def test_a_demo_that_cannot_run_ends_with_one_line(run_demo, env, status, says, begins):
    done = run_demo(status=status, **env)
    assert bool(done.stdout) == begins
    assert done.stderr.startswith("memsaver demo: ") and done.stderr.count("\n") == 1
    assert says in done.stderr


class Small(demo.SimulatedWorkload):
    """The demo's simulated workload with less memory, in the test's process."""

    def build(self):
        from memsaver import simulator

        with memsaver.region("weights", backup="host"):
            self.weights = [simulator.buffer(2 << 20) for _ in range(4)]
        with memsaver.region("kv_cache", backup="host"):
            self.kv = [simulator.buffer(4 << 20) for _ in range(2)]
        with memsaver.region("cuda_graph"):
            self.scratch = simulator.buffer(2 << 20)
        for buffer in [*self.weights, *self.kv]:
            buffer.array[:4] = b"data"

        self.built = self._checksum(self.weights)

    def train(self, nbytes):
        return memsaver.device_memory()[0]


def overwrite(self):
    self.weights[0].array[:4] = bytes(4)


class ChangesWeights(Small):
    def train(self, nbytes):
        memsaver.resume("weights")
        overwrite(self)
        memsaver.pause("weights")
        return super().train(nbytes)


class ChangesOutput(Small):
    def output(self):
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls


class MovesAddresses(Small):
    def addresses(self):
        self.asked = getattr(self, "asked", 0) + 1
        return [self.asked]


class WakesTheCache(Small):
    def weights_intact(self):
        memsaver.resume("kv_cache")
        return super().weights_intact()


class KeepsMemory(Small):
    def train(self, nbytes):
        from memsaver import simulator

        with memsaver.region("trainer"):
            self.kept = simulator.buffer(64 << 20)
        return memsaver.device_memory()[0]


@pytest.fixture
def run_workload(sim, tag, monkeypatch):
    tag.names.extend([*demo.TAGS, "trainer"])

    def run(workload, width=120):
        work = workload("a test")
        monkeypatch.setattr(demo, "choose_workload", lambda: work)
        out = work.shown = io.StringIO()
        status = demo.run(Console(file=out, width=width, force_terminal=False))
        memsaver.resume(*demo.TAGS)
        return status, " ".join(out.getvalue().split())

    return run


def test_a_step_is_printed_when_it_ends(run_workload):
    before = []

    class Watches(Small):
        def train(self, nbytes):
            before.append(self.shown.getvalue())
            return super().train(nbytes)

    run_workload(Watches)
    assert [f"pause the engine ({cycle})" in before[0] for cycle in (1, 2)] == [True, False]


@pytest.mark.parametrize("width", [50, 60])
def test_a_narrow_terminal_loses_neither_steps_nor_figures(run_workload, width):
    status, text = run_workload(Small, width)
    assert status == 0 and "every check passed" in text and "…" not in text
    for words in (
        "build the engine",
        "pause the",
        "a trainer",
        "resume weights",
        "resume the rest",
    ):
        assert words in text
    for name in ("ms", "free", "weights", "kv_cache", "graph"):
        assert f" {name} " in text


def test_an_interrupt_reports_the_transition_that_it_waits_for(run_workload, sim, capfd):
    class Interrupted(Small):
        def output(self):  # before the first pause, whose copies the test delays
            sim.hold_streams(True)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            return super().output()

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end:
            run_workload(Interrupted)
        again = signal.getsignal(signal.SIGINT)
        going = memsaver.state("weights")
    finally:
        signal.signal(signal.SIGINT, handler)
        sim.hold_streams(False)
        memsaver.resume(*demo.TAGS)
    assert (end.value.code, going, again) == (130, "saving", signal.SIG_DFL)
    text = "memsaver demo: interrupted in the step 'pause the engine (1)': waiting for its end"
    err = capfd.readouterr().err
    assert err.startswith(text) and err.count("\n") == 1


def test_an_interrupt_between_transitions(run_workload, capfd):
    class Interrupted(Small):
        def train(self, nbytes):
            raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end:
            run_workload(Interrupted)
    finally:
        signal.signal(signal.SIGINT, handler)
        memsaver.resume(*demo.TAGS)
    text = "memsaver demo: interrupted in the step 'a trainer uses the memory'\n"
    assert (end.value.code, capfd.readouterr().err) == (130, text)


@pytest.mark.parametrize(
    "workload, says",
    [
        (ChangesWeights, "resume weights: the weights changed"),
        (ChangesOutput, "resume the rest: the output changed"),
        (MovesAddresses, "resume the rest: an address moved"),
        (WakesTheCache, "resume weights: the KV cache woke too"),
        (KeepsMemory, "became free"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_check_that_does_not_hold(run_workload, workload, says):
    status, text = run_workload(workload)
    assert status == 1
    assert "failed:" in text and says in text
    assert "✗" in text and "every check passed" not in text


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_demo_describes_its_silent_steps(tmp_path):
    done = subprocess.run(
        ["make", "--dry-run", "demo", f"VENV={tmp_path}/new"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    before = ""
    silent = ("make_venv.py", "setup.py --quiet", "pip install --quiet --disable")
    for line in done.stdout.splitlines():
        if any(name in line for name in silent) and "requirements.txt" not in line:
            assert "echo" in before, f"nothing is said before {line}"
        before = line
