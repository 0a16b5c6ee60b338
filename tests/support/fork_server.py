"""A process that imports modules once and forks child processes, which need not repeat the imports.

`rank_processes` starts the process with the name of a list in MODULES and sends requests. The
process has one thread, has opened no driver, and has imported memsaver only if the list includes
it. The children are therefore like new interpreters with loaded modules. Requests and answers are
lines of JSON. The process ends after the last request.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import types
from typing import Any

# What memsaver, its command line and the tests' helpers import of the standard library.
PLAIN = (
    "asyncio",
    "concurrent.futures.thread",
    "ctypes",
    "dataclasses",
    "hashlib",
    "importlib.metadata",
    "importlib.resources",
    "inspect",
    "multiprocessing.connection",
    "random",
    "subprocess",
    "tempfile",
    "uuid",
)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

MODULES = {
    "torch": (
        "pytest",
        "torch._dynamo",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ),
    # For tests that do not depend on the import of memsaver, whose variables have no effect on it.
    # The process that imports these is itself forked from the one with torch.
    "memsaver": (
        "memsaver.distributed",
        "memsaver.integrations.rollout.rollout_engine",
        "memsaver.integrations.rollout.weights",
        "memsaver.integrations.sglang.weight_calls",
        "memsaver.integrations.trainer",
        "memsaver.simulator",
    ),
    "plain": PLAIN,
    "command line": (*PLAIN, "rich.pager", "rich.styled", "rich.table", "used_typer"),
}


def serve() -> dict[str, Any] | None:
    """Answer requests; in a forked process, return the request that the process must run."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "adopted" in request:
            process, answer = for_adoption(request["adopted"])
            if process is not None:
                answers.close()
                return process
            print(answer, file=answers, flush=True)
            continue
        ranks: dict[int, int] = {}
        adopts_orphans(True)
        for rank, process in enumerate(request["processes"]):
            pid = os.fork()
            if pid == 0:
                answers.close()
                return process
            ranks[pid] = rank
        answer = ended(ranks, request["timeout"], request["linger"])
        adopts_orphans(False)  # those of `for_adoption` have another parent
        print(json.dumps(answer), file=answers, flush=True)
    return None


def for_adoption(process: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Fork a process that is not a child of this process.

    The parent of the new process is the nearest ancestor that adopts orphans. The function returns
    `process` in the new process. In this process, it returns the new process's pid after the new
    process has opened its files.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        first_parent = os.getpid()
        if os.fork() > 0:
            os._exit(0)
        while os.getppid() == first_parent:
            time.sleep(0.0005)
        os.close(reading)
        return {**process, "ready": writing}, ""
    os.close(writing)
    os.waitpid(between, 0)
    with os.fdopen(reading) as pipe:
        return None, pipe.read()


def adopts_orphans(does: bool) -> None:
    """Set whether this process adopts descendants whose parents have ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(does))


def ended(
    ranks: dict[int, int], timeout: float, linger: float
) -> tuple[list[int | None], list[str]]:
    """Wait for processes and kill those that do not end.

    Args:
        ranks: the rank of each process, by pid.
        timeout: the time limit for the ranks, in seconds.
        linger: the time limit for the ranks' own child processes after the last rank has ended, in
            seconds.

    Returns:
        The ranks' statuses in order (None for a rank killed at the timeout), and the pids and
        commands of other processes that were killed after all ranks had ended.
    """
    statuses: list[int | None] = [None] * len(ranks)
    deadline = time.monotonic() + timeout
    left = set(ranks)
    leaked: list[str] = []
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in left:
                left.remove(pid)
                statuses[ranks[pid]] = os.waitstatus_to_exitcode(status)
                if not left:
                    deadline = time.monotonic() + linger
            elif not pid:
                time.sleep(0.01)
        if not left:
            leaked = [f"{pid} {command}" for pid, command in children().items() if command]
        while True:  # an orphan's own children become orphans
            for pid in children():
                os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
    return statuses, leaked


def children() -> dict[int, str]:
    """Return the commands of this process's children, by pid; "" for a child that has ended."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{name}/stat", "rb") as stat:
                parent = stat.read().rpartition(b")")[2].split()[1]
            if int(parent) == os.getpid():
                with open(f"/proc/{name}/cmdline", "rb") as command:
                    text = command.read().decode(errors="replace")
                found[int(name)] = text.replace("\0", " ").strip()
    return found


def share_by_file_names() -> None:
    """Start torch's helper for memory shared by file name, then continue in a forked process.

    Without this helper, each process that shares memory by file name would start its own helper,
    which takes half a second of CPU time. The helper is a child of this process, which then only
    waits for the forked process. The helper keeps the files of killed processes until all forked
    processes have ended.
    """
    import torch

    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    torch.ones(1).share_memory_()
    torch.multiprocessing.set_sharing_strategy(before)
    pid = os.fork()
    if pid > 0:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become(process: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Adopt the environment, folder and output files; return the code and its globals."""
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    for number, name, flags in (
        (0, process.get("input", os.devnull), os.O_RDONLY),
        (1, process["output"], os.O_WRONLY | os.O_APPEND),
        (2, process["errors"], os.O_WRONLY | os.O_APPEND),
    ):
        file = os.open(name, flags)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    if "ready" in process:
        os.write(process["ready"], str(os.getpid()).encode())
        os.close(process["ready"])
    if process.get("session"):
        os.setsid()
    os.environ.clear()
    os.environ.update(process["environment"])
    if "encoding" in process:
        encoding = process["encoding"]
        sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
        errors = "backslashreplace"
        sys.stderr = os.fdopen(2, "w", 1, encoding, errors=errors, closefd=False)
    new_paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    script = process["script"]
    main = types.ModuleType("__main__")
    if process.get("without_file"):  # as with `python -c`
        new_paths.insert(0, "")
        sys.argv = ["-c"]
    else:
        sys.argv = [script, *process.get("arguments", ())]
        main.__file__ = script
    if "arguments" in process:
        new_paths.insert(0, os.path.dirname(script))
    sys.path[:] = [*new_paths, *(path for path in sys.path if path not in paths)]
    os.chdir(process["folder"])
    sys.modules["__main__"] = main
    with open(script) as file:
        return compile(file.read(), script, "exec"), vars(main)


def leave() -> None:
    """Exit without unloading torch's modules, because unloading takes a quarter of a second.

    Tests for code that runs at interpreter exit use new interpreters.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    with_torch = sys.argv[1] in ("torch", "memsaver")
    if with_torch:
        faulthandler.enable()
    gc.disable()  # imports create only permanent objects
    for name in MODULES[sys.argv[1]]:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("an import has started threads: what is forked would be without them")
    gc.enable()
    gc.freeze()  # no collection, even at exit, need scan the loaded modules
    if sys.argv[1] == "torch":  # the others with torch are forked from this one
        share_by_file_names()
    forked = serve()
    if forked is not None:
        if with_torch:
            atexit.register(leave)  # before all others, so that it runs after them
        try:
            exec(*become(forked))
        except BaseException:
            atexit.unregister(leave)  # the interpreter reports the error, and ends
            raise
