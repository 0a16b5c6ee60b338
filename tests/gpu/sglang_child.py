"""Start one SGLang engine and run scenarios on it, by name, one after the other.

usage: sglang_child.py GROUP FOLDER

It prints a line of JSON for the start, and one for each "module.function" that it reads from stdin.
All other output of this process and of SGLang goes to stderr, which the caller sends to FOLDER/log.
SGLang's processes import this file again, so it imports only modules that every process needs.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

STUCK_SECONDS = 80  # after which every thread's stack is logged

GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")


def check_installation() -> None:
    """Raise if SGLang would not find memsaver's plugin."""
    missing = [
        group for group in GROUPS if "memsaver" not in {e.name for e in entry_points(group=group)}
    ]
    if missing:
        raise RuntimeError(
            f"SGLang is installed, and memsaver is not, as far as entry points go ({missing[0]} "
            "has none): install it (`pip install .`, with `--target FOLDER` where FOLDER is on "
            "PYTHONPATH), and keep the source tree out of PYTHONPATH"
        )


def attempt(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Run `work`; return its result and the reply about it."""
    started = time.perf_counter()
    reply: dict[str, Any] = {"ok": True, "trace": ""}
    result = None
    try:
        result = work()
    except BaseException:
        reply = {"ok": False, "trace": traceback.format_exc()}
    reply["seconds"] = round(time.perf_counter() - started, 2)
    return result, reply


def serve(group: str, folder: Path) -> None:
    """Start the group's engine, and run the scenarios named on stdin until one fails."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    def start() -> Any:
        check_installation()
        from sglang_engines import start

        return start(group, folder)

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


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
