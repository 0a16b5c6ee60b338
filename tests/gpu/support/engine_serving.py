"""The program of a child process that runs named scenarios on one engine, one after the other.

The program prints a line of JSON with the outcome of the start, and a line for each
"module.function" that it reads from stdin. All other output goes to stderr, which the caller
redirects to a log. An engine's processes might import the program again, so the program imports
only modules that every process needs.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

STUCK_SECONDS = 80  # after which every thread's stack is logged


def check_plugins(engine: str, groups: tuple[str, ...]) -> None:
    """Raise an error if an engine would not find memsaver's plugins in its entry point groups."""
    missing = [
        group for group in groups if "memsaver" not in {e.name for e in entry_points(group=group)}
    ]
    if missing:
        raise RuntimeError(
            f"{engine} is installed, and memsaver is not, as far as entry points go ({missing[0]} "
            "has none): install it (`pip install .`, with `--target FOLDER` where FOLDER is on "
            "PYTHONPATH), and keep the source tree out of PYTHONPATH"
        )


def attempt(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Run `work`; return its result and the reply that describes the outcome."""
    started = time.perf_counter()
    reply: dict[str, Any] = {"ok": True, "trace": ""}
    result = None
    try:
        result = work()
    except BaseException:
        reply = {"ok": False, "trace": traceback.format_exc()}
    reply["seconds"] = round(time.perf_counter() - started, 2)
    return result, reply


def end_with_parent(parent: int) -> None:
    """Kill this process group, including the engine's processes, if the caller's process ends
    first.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def serve(start: Callable[[], Any]) -> None:
    """Start an engine and run the scenarios named on stdin until one fails.

    Args:
        start: a function that starts the engine and returns a session. The session is passed to
            each scenario and must have a `close` method.
    """
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    session, reply = attempt(start)
    answer(reply)
    if session is None:
        return

    def run(name: str) -> None:
        module, _, function = name.partition(".")
        getattr(importlib.import_module(module), function)(session)

    try:
        for line in sys.stdin:
            print(f"--- {line.strip()}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(STUCK_SECONDS)
            _, reply = attempt(functools.partial(run, line.strip()))
            faulthandler.cancel_dump_traceback_later()
            answer(reply)
            if not reply["ok"]:
                return
    finally:
        session.close()
