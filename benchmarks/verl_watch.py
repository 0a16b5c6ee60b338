"""Record verl's memory requests to its SGLang server, and the capacity of the server's KV cache.

verl imports this module in each of its processes, if VERL_USE_EXTERNAL_MODULES names it. The module
measures calls but does not change them. Each request appends one line of JSON to the file that FILE
names. The line contains the request's name, tags and duration in seconds, and the memory in use
after the request.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from device_memory import DeviceMemory

FILE = "VERL_WATCH_FILE"  # the variable with the path of the record
SLEEP, RESUME, STARTED = "sleep", "resume", "started"
SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server"
CLIENT = "verl.workers.rollout.sglang_rollout.http_server_engine"
ENGINE = "sglang.srt.entrypoints.engine"

# Parts of the paths of the savers' libraries, in the order in which `saver_of` looks for them.
LIBRARIES = (("torch_memory_saver", "torch_memory_saver_hook"), ("memsaver", "/memsaver/_C."))


def record(**line: Any) -> None:
    """Append a line to the file; the lines of different processes are not interleaved."""
    text = json.dumps({"at": time.time(), **line}) + "\n"
    descriptor = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def used_bytes() -> int | None:
    """Return the bytes in use on the first visible GPU; None if NVML is missing."""
    try:
        return DeviceMemory().used()
    except RuntimeError:
        return None


def saver_of(pids: Sequence[int]) -> str | None:
    """Return the name of the processes' memory saver; None if the processes use no saver.

    memsaver's SGLang plugin imports memsaver even if the plugin is turned off. If memsaver is in
    use, the library of torch_memory_saver is not loaded.
    """
    maps = []
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has exited
            maps.append(Path(f"/proc/{pid}/maps").read_text(errors="replace"))
    return next((name for name, part in LIBRARIES if any(part in text for text in maps)), None)


def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a coroutine function to record each call that succeeds."""

    @functools.wraps(method)
    async def call(*args: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        result = await method(*args, **keywords)
        seconds = time.perf_counter() - begin
        record(call=name, tags=keywords.get("tags"), seconds=seconds, used=used_bytes())
        return result

    return call


def watch_server(module: ModuleType) -> None:
    """Measure the release of both tags that verl requests after each generation."""
    module.SGLangHttpServer.sleep = timed(SLEEP, module.SGLangHttpServer.sleep)


def watch_client(module: ModuleType) -> None:
    """Measure the two resumes that verl requests before and after it sends weights."""
    adapter = module.AsyncHttpServerAdapter
    adapter.resume_memory_occupation = timed(RESUME, adapter.resume_memory_occupation)


def watch_engine(module: ModuleType) -> None:
    """Record a started engine's memory saver and the number of tokens in its KV cache."""
    start = module.Engine.__dict__["_launch_subprocesses"].__func__

    @functools.wraps(start)
    def launch(cls: type, *args: Any, **keywords: Any) -> Any:
        result = start(cls, *args, **keywords)
        started = next(part for part in result if hasattr(part, "scheduler_infos"))
        tokens = started.scheduler_infos[0]["max_total_num_tokens"]
        record(call=STARTED, tokens=tokens, saver=saver_of(started.all_child_pids))
        return result

    module.Engine._launch_subprocesses = classmethod(launch)


WATCHED: dict[str, Callable[[ModuleType], None]] = {
    SERVER: watch_server,
    CLIENT: watch_client,
    ENGINE: watch_engine,
}


class Finder(importlib.abc.MetaPathFinder):
    """A finder that lets other finders import a watched module, and then starts to measure it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a watched module; None for any other module."""
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                watch = functools.partial(execute, spec.loader.exec_module, WATCHED[name])
                spec.loader.exec_module = watch  # type: ignore[method-assign]
                return spec
        return None


def execute(
    run: Callable[[ModuleType], None], watch: Callable[[ModuleType], None], module: ModuleType
) -> None:
    """Execute a module, and start its measurement."""
    run(module)
    watch(module)


if FILE in os.environ:
    sys.meta_path.insert(0, Finder())
