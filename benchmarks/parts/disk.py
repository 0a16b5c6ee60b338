"""Measure pauses and resumes of 8 GB with a backup on disk, and direct I/O in the same directory.

The libraries and the direct I/O take turns. Before each resume, the files' pages are dropped from
the page cache, so that the resume reads from the disk. The file for direct I/O has already been
written once.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comparison
import results
import workloads
from children import Child, Failed, attempt
from direct_io import THREADS, DirectFile, drop_page_cache
from libraries import DEFAULT, OURS, PEERS, open_library
from saved import Saved
from serve import Worker
from workloads import GIB, MIB

TENSORS, TENSOR_BYTES = 60, 128 * MIB
TOTAL = TENSORS * TENSOR_BYTES
PATIENCE = 600  # seconds for a request, because the disk may be slow

DIRECT = f"direct I/O, {THREADS} threads"


class Disk(Worker):
    """A worker that measures pauses and resumes with a backup on disk."""

    def __init__(self, name: str, directory: str) -> None:
        workloads.start_cuda()
        self._library = open_library(name)
        self._directory = Path(directory)
        self._library.use_disk(directory)

    def setup(self) -> dict[str, Any]:
        """Create the tensors."""

        def tensors() -> list[Any]:
            return workloads.blocks(TENSORS, TENSOR_BYTES)

        self._saved = Saved(self._library, "disk", "disk", tensors)
        return {"bytes": self._saved.bytes}

    def cycle(self) -> dict[str, Any]:
        """Change all contents, pause, and resume from a file that is not cached."""
        self._saved.change()
        paused = self._saved.pause()
        files = drop_page_cache(self._directory)
        return {"pause": paused, "resume": self._saved.resume(), "files": files}


@contextlib.contextmanager
def place(directory: Path, copies: int) -> Iterator[Path]:
    """Yield a new subdirectory with space for `copies` backups; remove it with its files."""
    try:
        free = shutil.disk_usage(directory).free
        if free < (copies * TOTAL) + GIB:
            raise Failed(
                f"disk: {free / GIB:.1f} GiB are free in {directory}, but {copies} times "
                f"{TOTAL / GIB:.1f} GiB are needed: choose another --disk-dir"
            )
        made = Path(tempfile.mkdtemp(prefix="memsaver-bench-", dir=directory))
    except OSError as error:
        raise Failed(f"disk: {directory} cannot be used ({error})") from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def direct_file(directory: Path, failures: list[str]) -> Iterator[DirectFile | None]:
    """Yield a file that direct I/O wrote and read once; None if direct I/O is unsupported."""
    file: DirectFile | None = None
    try:
        file = DirectFile(directory, TOTAL)
        file.write_ms()
        file.read_ms()
    except OSError as error:
        failures.append(f"disk: no direct I/O in {directory} ({error}), so there are no rates")
        if file:
            file.close()
            file = None
    try:
        yield file
    finally:
        if file:
            file.close()


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for disk_*."""
    found: dict[str, dict[str, list[float]]] = {}
    with attempt(failures), contextlib.ExitStack() as stack:
        names = [OURS, *([DEFAULT] if options.peer else ())]
        folder = stack.enter_context(place(options.disk_dir, len(names) + 1))
        children = []
        for name in names:
            own = folder / name
            own.mkdir()
            child = stack.enter_context(Child("parts.disk:Disk", name, directory=str(own)))
            children.append(child)
            found[name] = {"pause": [], "resume": []}
        direct = stack.enter_context(direct_file(folder, failures))
        if direct:
            found[DIRECT] = {"pause": [], "resume": []}
        for child in children:
            child.ask("setup")
        for cycle in range(options.disk_cycles):
            turns: list[Child | DirectFile] = [*children, *([direct] if direct else [])]
            first = cycle % len(turns)
            for turn in turns[first:] + turns[:first]:
                if isinstance(turn, Child):
                    reply = turn.ask("cycle", within=PATIENCE)
                    if turn.name != OURS and not reply["files"]:
                        print(f"disk: found no file of {turn.name}; its resume may read a cache")
                else:
                    reply = {"pause": turn.write_ms(), "resume": turn.read_ms()}
                values = found[turn.name if isinstance(turn, Child) else DIRECT]
                for key, times in values.items():
                    times.append(reply[key])
    yield from rows(found)


def rows(found: dict[str, dict[str, list[float]]]) -> Iterator[dict[str, Any]]:
    """Yield rows that compare milliseconds with the peer and rates with direct I/O."""
    for what in ("pause", "resume"):
        values = {name: times[what] for name, times in found.items() if times[what]}
        direct, ours = values.get(DIRECT), values.get(OURS)
        if not ours:
            continue
        yield from comparison.compared(f"disk_{what}_ms", values, direct)
        if direct:
            yield results.percentage(f"disk_{what}_rate", ours, DIRECT, direct)
        if not set(PEERS) & set(values):
            comparison.show(f"disk_{what}_ms", ours)
