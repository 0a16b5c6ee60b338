"""Runs Python code, for example as ranks, in forks of a process with loaded modules."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import Popen  # not a test's replacement
from typing import Any

from repository import IMPORT_PATH, SUPPORT

from memsaver._runtime.native import LIBRARY_DIR

Process = dict[str, Any]  # see `fork_server.become`

LINGER_SECONDS = 20.0

_LIBC = ctypes.CDLL(None)
_PR_SET_CHILD_SUBREAPER = 36

# By the name of the loaded modules (see `fork_server.MODULES`), and by LD_LIBRARY_PATH, which the
# dynamic linker reads only when a process starts.
_servers: dict[tuple[str, str | None], subprocess.Popen[str]] = {}


def run(
    code: str,
    size: int,
    folder: Path,
    *,
    statuses: Mapping[int, int] | None = None,
    timeout: float = 60,
    fresh: bool = False,
) -> list[str]:
    """Run `code` as ranks 0 to `size` - 1 on the simulated driver; return each rank's output.

    Every process must end with status 0, except the ranks in `statuses`. `timeout` is the limit for
    all processes together, in seconds. The processes have imported torch and memsaver. With
    `fresh`, the processes are new interpreters, whose start takes several seconds longer.
    """
    environment = _environment()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    environment.update(MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(size))
    script = folder / "ranks.py"
    script.write_text(code)
    outputs = [folder / str(rank) for rank in range(size)]
    for output in outputs:
        output.write_text("")
    processes = [
        {
            "script": str(script),
            "folder": str(folder),
            "environment": {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            "output": str(output),
            "errors": str(output),
        }
        for rank, output in enumerate(outputs)
    ]
    try:
        ended = _started(processes, timeout) if fresh else _forked(processes, timeout, "memsaver")
    finally:
        said = [output.read_text() for output in outputs]
        report = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(said))
        print(report)
    assert ended == [(statuses or {}).get(rank, 0) for rank in range(size)], report
    return said


def run_forked(
    code: str, environment: Mapping[str, str], folder: Path, *, modules: str, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has imported `fork_server.MODULES[modules]`.

    `environment` must contain PYTHONPATH. The process ignores all other variables that an
    interpreter reads at startup. With the modules "plain", the code runs as with `python -c`: no
    file appears in `folder`, and spawned processes do not rerun the code. Raises AssertionError if
    the process runs longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="memsaver-forked-") as elsewhere:
        files = Path(elsewhere) if modules == "plain" else folder
        script, output, errors = (files / f"forked.{name}" for name in ("py", "out", "err"))
        script.write_text(code)
        output.write_text("")
        errors.write_text("")
        process: Process = {
            "script": str(script),
            "without_file": modules == "plain",
            "folder": str(folder),
            "environment": dict(environment),
            "output": str(output),
            "errors": str(errors),
        }
        (status,) = _forked([process], timeout, modules)
        said = output.read_text(), errors.read_text()
    assert status is not None, f"no end within {timeout} s:\n" + "".join(said)
    return subprocess.CompletedProcess([str(script)], status, *said)


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    environment.update(
        MEMSAVER_DRIVER="sim",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join([IMPORT_PATH, str(LIBRARY_DIR.parent)]),
    )
    return environment


def _started(processes: Sequence[Process], timeout: float) -> list[int | None]:
    """Return the exit statuses of new interpreters, with None for an interpreter that timed out."""
    deadline = time.monotonic() + timeout
    started: list[subprocess.Popen[bytes]] = []
    ended: list[int | None] = []
    try:
        for process in processes:
            with open(process["output"], "a") as output:
                started.append(
                    subprocess.Popen(
                        [sys.executable, process["script"]],
                        env=process["environment"],
                        cwd=process["folder"],
                        stdout=output,
                        stderr=output,
                    )
                )
        for one in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0, deadline - time.monotonic()))
            ended.append(one.returncode)
    finally:
        for one in started:
            one.kill()
            one.wait()
    return ended


def _forked(
    processes: Sequence[Process], timeout: float, modules: str = "torch"
) -> list[int | None]:
    """Return the exit statuses of `fork_server`'s children, with None for a child that timed out.

    Raises AssertionError if the children's own processes are still running LINGER_SECONDS after the
    children have ended.
    """
    request = {"processes": processes, "timeout": timeout, "linger": LINGER_SECONDS}
    statuses: list[int | None]
    statuses, leaked = _answer(request, processes[0]["environment"], modules)
    assert not leaked, f"processes were left running: {'; '.join(leaked)}"
    return statuses


def adopted(process: Process, modules: str = "torch") -> int:
    """Start a process that has imported `fork_server.MODULES[modules]` as a child of this process.

    Returns the process's pid. Besides a rank's items, `process` can contain "input" (the input
    file), "arguments" (for the script), "session" (whether the process leads a session), and
    "encoding" (for stdout and stderr, which are then reopened; None for the default encoding).
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans below this process become its children
    try:
        pid: int = _answer({"adopted": process}, process["environment"], modules)
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)
    return pid


def _answer(request: dict[str, Any], environment: Mapping[str, str], modules: str = "torch") -> Any:
    """Request new processes from the `fork_server` for this environment; return the server's
    answer.
    """
    libraries = environment.get("LD_LIBRARY_PATH")
    key = modules, libraries
    if key not in _servers:  # runs until this process ends, which closes its pipe
        linked = {} if libraries is None else {"LD_LIBRARY_PATH": libraries}
        start = Popen
        if modules == "memsaver":
            from warm_processes import WarmPopen as start

        _servers[key] = start(
            [sys.executable, str(SUPPORT / "fork_server.py"), modules],
            env={k: v for k, v in _environment().items() if k != "LD_LIBRARY_PATH"} | linked,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    server = _servers[key]
    assert server.stdin is not None and server.stdout is not None
    try:
        print(json.dumps(request), file=server.stdin, flush=True)
        line = server.stdout.readline()
        assert line, f"fork_server.py ended with status {server.wait(10)}; its stderr says why"
        return json.loads(line)
    except BaseException:  # for example a test's timeout: end all of its ranks
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
        del _servers[key]
        raise
