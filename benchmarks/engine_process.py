"""Run an inference engine in its own process, and read the GPU's memory in use."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from children import Child, Failed
from device_memory import visible_gpu

START_SECONDS = 300  # kernels are compiled on first use
FREE_SECONDS = 60  # limit for the memory of an ended process to become free
NOISE_MIB = 64  # maximum difference between two readings of unchanged memory
BATCHES = 2  # measured batches in each turn of `decode_in_turns`

_begin = time.monotonic()


def say(text: str) -> None:
    """Print progress to stderr, with the seconds since the start."""
    print(f"[{time.monotonic() - _begin:6.1f}] {text}", file=sys.stderr, flush=True)


def used_mib(place: int = 0) -> float:
    """Return the MiB in use on the visible GPU at an index. Creates no CUDA context."""
    query = (
        "nvidia-smi",
        "-i",
        visible_gpu(place),
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    )
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return float(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RuntimeError(f"nvidia-smi does not report the memory in use: {error}") from None


def wait_until_free(idle_mib: float) -> None:
    """Wait until at most `idle_mib` + NOISE_MIB MiB are in use. Raises Failed on a timeout."""
    end = time.monotonic() + FREE_SECONDS
    while (used := used_mib()) > idle_mib + NOISE_MIB:
        if time.monotonic() > end:
            raise Failed(f"{used:.0f} MiB of the GPU are in use, {idle_mib:.0f} were at first")
        time.sleep(0.5)


def inherited_without(prefixes: tuple[str, ...], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return `inherited` for use in another folder, without variables with one of the prefixes."""
    found = {key: value for key, value in inherited.items() if not key.startswith(prefixes)}
    places = [place for place in found.get("PYTHONPATH", "").split(os.pathsep) if place]
    if places:
        found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in places)
    if os.path.isdir("/usr/local/cuda"):
        found.setdefault("CUDA_HOME", "/usr/local/cuda")
    return found


def process(
    worker: str,
    name: str,
    environ: Mapping[str, str],
    options: argparse.Namespace,
    **settings: Any,
) -> Child:
    """Start a process that imports the engine's modules; `begin` starts the engine.

    Args:
        worker: the process's worker; see `Child`.
        name: the name of the engine's memory saver.
        environ: the environment variables of all processes of the engine.
        options: the benchmark's options.
        settings: additional arguments of the worker.
    """
    environ = dict(environ)
    if options.device == "cpu":  # a fake engine and a fake trainer
        environ["MEMSAVER_DRIVER"] = "sim"
    return Child(
        worker,
        name,
        environment=environ,
        cwd=str(options.model),
        tree=True,
        model=str(options.model),
        small=options.small,
        wait=options.wait,
        device=options.device,
        **settings,
    )


def begin(child: Child, options: argparse.Namespace) -> dict[str, Any]:
    """Start the engine in a child from `process`, and return the reply to `start`."""
    say(f"{child.name}: starting an engine")
    child.ready()
    started = child.ask("start", within=START_SECONDS)
    options.compiled = True
    say(f"{child.name}: up after {started['seconds']:.1f} s, {started['used']:.0f} MiB in use")
    return started


@contextlib.contextmanager
def running(
    make: Callable[[], Child], options: argparse.Namespace
) -> Iterator[tuple[Child, dict[str, Any]]]:
    """Start an engine for the block; yield its process and the reply to `start`.

    The function waits until the GPU's memory is free before it starts the engine. At the end of the
    block, the engine's memory is free again.
    """
    wait_until_free(options.idle_mib)
    with make() as child:
        yield child, begin(child, options)
        with contextlib.suppress(Failed):  # the process is killed in any case
            child.ask("stop")


def decode_in_turns(one: Child, other: Child, turns: int) -> dict[str, list[float]]:
    """Return the tokens per second, by engine name, of two engines that decode alternately."""
    rates: dict[str, list[float]] = {one.name: [], other.name: []}
    for turn in range(turns):
        for child in (one, other) if turn % 2 else (other, one):
            # `decode` first runs an unmeasured batch to refresh caches after the other's turn.
            rates[child.name] += child.ask("decode", times=BATCHES)["tokens_per_s"]
    for name, values in rates.items():
        say(f"{name}: {statistics.median(values):.1f} tokens/s, {min(values)}..{max(values)}")
    return rates
