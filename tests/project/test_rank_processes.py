"""Tests that forked processes with torch behave like new processes, and that none keeps running."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import rank_processes
from warm_processes import WarmPopen, run_command

from memsaver._runtime.native import LIBRARY_DIR

pytest.importorskip("torch")

# Each rank checks its environment, and ends in a different way.
CODE = """
import os, signal, sys, threading, time
rank = int(os.environ["RANK"])
assert __name__ == "__main__" and sys.argv == [__file__] and os.getcwd() in __file__
assert "libmemsaver_sim" not in open("/proc/self/maps").read()
assert threading.active_count() == 1 and not sys.stdin.read()
assert not [name for name in os.environ if name.startswith("MEMSAVER_") and name[9:] != "DRIVER"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], os.getpid(), flush=True)
if rank == 1:
    sys.exit(7)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 3:
    raise OSError("of rank 3")
"""


@pytest.mark.parametrize("fresh", [True, False])
def test_each_has_its_own_end_and_output(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv("MEMSAVER_SHARE_BYTES", "2MiB")
    ends = {1: 7, 2: -9, 3: 1}
    said = rank_processes.run(CODE, 4, tmp_path, statuses=ends, fresh=fresh)
    assert [text.split()[:4] for text in said] == [f"rank {n} of 4".split() for n in range(4)]
    assert "OSError: of rank 3" in said[3]
    assert len({text.split()[4] for text in said}) == 4
    with pytest.raises(AssertionError, match="of rank 3"):
        rank_processes.run(CODE, 4, tmp_path, fresh=fresh)


@pytest.mark.parametrize("fresh", [True, False])
def test_no_rank_outlives_its_timeout(tmp_path, fresh):
    code = """
import os, time
print(os.getpid(), flush=True)
if os.environ["RANK"] == "1":
    time.sleep(60)
"""
    start = time.monotonic()
    with pytest.raises(AssertionError):
        rank_processes.run(code, 2, tmp_path, timeout=3, fresh=fresh)
    assert time.monotonic() - start < 30
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)
    assert rank_processes.run("print(5)", 1, tmp_path, fresh=fresh) == ["5\n"]


@pytest.mark.parametrize("modules", ["torch", "memsaver", "plain"])
def test_a_process_that_is_left_behind_is_an_error_and_ends(tmp_path, monkeypatch, modules):
    def run(seconds):
        code = (
            "import subprocess, sys\n"
            f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({seconds})'])\n"
        )
        return rank_processes.run_forked(code, dict(os.environ), tmp_path, modules=modules)

    assert run(0.5).returncode == 0
    monkeypatch.setattr(rank_processes, "LINGER_SECONDS", 1)
    with pytest.raises(AssertionError, match=r"left running: \d+ .*sleep\(60\)") as caught:
        run(60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(re.search(r"running: (\d+)", str(caught.value))[1]), 0)
    assert run(0).returncode == 0


@pytest.mark.long
def test_an_interrupt_during_the_wait_ends_the_ranks(tmp_path, monkeypatch):
    def interrupted(text):
        raise KeyboardInterrupt

    rank_processes.run("pass", 1, tmp_path)
    server = rank_processes._servers["memsaver", os.environ.get("LD_LIBRARY_PATH")].pid
    monkeypatch.setattr(rank_processes.json, "loads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank_processes.run("pass", 1, tmp_path)
    monkeypatch.undo()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
    assert rank_processes.run("print(5)", 1, tmp_path) == ["5\n"]


# Each part of the output must not differ from that of a new interpreter.
INTERPRETER = """
import atexit, faulthandler, os, signal, sys, threading
print(sys.argv, [path for path in sys.path if path != os.getcwd()], "__file__" in globals())
print(__name__, os.getcwd(), os.listdir())
print(sys.flags, sys.stdin.read(), sys.stdout.encoding, sys.stdout.isatty(), os.environ["WORD"])
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGSEGV)], threading.active_count())
print(sorted(os.listdir("/proc/self/fd")), faulthandler.is_enabled(), "memsaver" in sys.modules)
atexit.register(print, "at exit")
class Last:
    def __del__(self):
        print("freed at exit", file=sys.stderr)
last = Last()
sys.exit(5)
"""


def test_code_runs_as_in_a_new_interpreter(run_python, tmp_path):
    (tmp_path / "beside").touch()
    new, forked = (run_python(INTERPRETER, status=5, fresh=f, WORD="x") for f in (True, False))
    assert (forked.stdout, forked.stderr) == (new.stdout, new.stderr)
    assert new.stdout.endswith("at exit\n") and new.stderr == "freed at exit\n"


# A script tells what a new interpreter would find, then echoes its input, and ends with status 9.
SCRIPT = """
import json, os, sys
import beside
found = [sys.argv[1:], os.getcwd(), os.getppid(), os.getsid(0) == os.getpid(), sys.path[0]]
print(json.dumps([*found, os.environ.get("WORD"), "memsaver" in sys.modules]), flush=True)
print(sys.stdin.read(), file=sys.stderr)
sys.exit(9)
"""


@pytest.mark.parametrize("kind", [subprocess.Popen, WarmPopen])
@pytest.mark.parametrize("leads", [False, True])
def test_a_script_runs_as_in_a_new_interpreter(tmp_path, kind, leads):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").touch()
    process = kind(
        [sys.executable, str(tmp_path / "script.py"), "a", "b c"],
        env={**os.environ, "WORD": "x"},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=leads,
        text=True,
    )
    said, errors = process.communicate("to the end", timeout=60)
    assert errors == "to the end\n" and process.returncode == 9
    assert json.loads(said) == [["a", "b c"], "/", os.getpid(), leads, str(tmp_path), "x", False]


def test_a_script_can_be_killed_and_waited_for(tmp_path):
    (tmp_path / "script.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    command = [sys.executable, str(tmp_path / "script.py")]
    with WarmPopen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begun\n" and process.poll() is None
        process.kill()
        assert process.wait(30) == -9
    with WarmPopen(["sh", "-c", "exit 3"]) as process:
        assert process.wait(30) == 3


@pytest.mark.parametrize("words", [["--version"], ["trace", "ü.json"], ["run", "--", "ü✓"]])
def test_a_command_runs_as_in_a_new_interpreter(tmp_path, words):
    command = [sys.executable, "-m", "memsaver", *words]
    environment = {**os.environ, "PYTHONPATH": str(LIBRARY_DIR.parent), "PYTHONIOENCODING": "ascii"}
    new, forked = (
        run(command, env=environment, cwd=tmp_path, capture_output=True, check=False)
        for run in (subprocess.run, run_command)
    )
    ends = [(done.returncode, done.stdout, done.stderr) for done in (new, forked)]
    assert ends[0] == ends[1] and new.stdout + new.stderr
