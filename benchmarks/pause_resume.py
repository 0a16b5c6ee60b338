"""Pause and resume without a backup: memsaver beside torch_memory_saver, on the same tensors.

    PYTHONPATH=where/torch_memory_saver/lies python benchmarks/pause_resume.py [--only kv,many]

What is measured
    kv          64 tensors of 1 GiB in one tag
    discarded   the 195 weight tensors of an 8-billion-parameter decoder, 16 GB, in one tag
    many        10,000 allocations of 2 MiB in one tag
    bandwidth   a kernel on memory of a region against the same kernel on plain memory
    hook        a cudaMalloc/cudaFree pair outside any region, preloaded or not (hook_overhead.py)

Each library and setting lives in a process of its own, and so does the raw sequence of driver calls
that is the limit (handles of 1 GiB, one reservation, nothing else). The processes take turns, cycle
by cycle in rotating order, and all but the one whose turn it is are paused, so that each of them
meets the same device. All values count: none is left out as a warm-up or an outlier.

Between a pause and any resume that follows lies a wait of --gap seconds, as work in between would
be, so that the driver's clearing of released memory is not what is measured. The metrics that end
in _at_once_ms have no wait: each resume follows its pause immediately.

Prints a table and merges its rows into --output (see results.py).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import select
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import results

MIB = 1 << 20
GIB = 1 << 30

OURS = "memsaver"
LIMIT = "driver"
PEERS = {"tms": "torch_memory_saver", "tms-retained": "torch_memory_saver, retained backup"}

WORKLOADS = ("kv", "discarded", "many")
PARTS = (*WORKLOADS, "bandwidth", "hook")
MANY = 10_000

REPLY_SECONDS = 180  # no request takes longer; a child that does hangs

# The least ratio that is called good.
GOALS = {
    "kv": 1.0,
    "discarded": 1.3,
    "many": 5.0,
    "region_bandwidth": 0.99,
    "malloc_free_pair": round(1 / 1.01, 4),
}


# --- the children --------------------------------------------------------------------------------


def decoder_shapes() -> Iterator[tuple[int, ...]]:
    """The weights of a Llama with 8 billion parameters, fused as inference engines fuse them."""
    hidden, inter, vocab, layers, kv = 4096, 14336, 128256, 32, 1024
    yield (vocab, hidden)
    for _ in range(layers):
        yield (hidden + 2 * kv, hidden)
        yield (hidden, hidden)
        yield (2 * inter, hidden)
        yield (hidden, inter)
        yield (hidden,)
        yield (hidden,)
    yield (hidden,)
    yield (vocab, hidden)


def allocate(workload: str, kv_gib: int) -> list[Any]:
    """The workload's tensors, in the order of their making."""
    import torch

    if workload == "kv":
        return [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(kv_gib)]
    if workload == "discarded":
        return [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in decoder_shapes()]
    # torch asks for 2 MiB of memory where a tensor has up to 1 MiB; from there to 10 MiB it asks
    # for 20 MiB and cuts that up itself: 10,000 tensors of 2 MiB would be 1,000 allocations.
    # Tensors of 1 MiB fill a segment of 2 MiB two by two: 20,000 of them are 10,000 allocations of
    # 2 MiB, in either library. `Library.setup` counts them.
    return [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(2 * MANY)]


class Library:
    """A memory saver under measurement, in torch mode."""

    def __init__(self, name: str, kv_gib: int) -> None:
        self._kv_gib = kv_gib
        self._tensors: dict[str, list[Any]] = {}
        self._addresses: dict[str, list[int]] = {}
        self._ours = name == OURS
        self._region: Callable[[str], Any]
        if self._ours:
            import memsaver

            self._region = lambda tag: memsaver.region(tag, backup="none")
            self.pause: Callable[[str], Any] = memsaver.pause
            self.resume: Callable[[str], Any] = memsaver.resume
        else:
            from torch_memory_saver import torch_memory_saver as saver

            saver.hook_mode = "torch"
            if name == "tms-retained":
                saver.retain_cpu_backup = True
            self._region = lambda tag: saver.region(tag=tag, enable_cpu_backup=False)
            self.pause, self.resume = saver.pause, saver.resume

    def setup(self, workload: str) -> int:
        """Makes the tensors; their bytes."""
        before = self._segments()
        with self._region(workload):
            tensors = allocate(workload, self._kv_gib)
        if workload == "many":
            made = [s for address, s in self._segments().items() if address not in before]
            if made != [2 * MIB] * MANY:
                raise RuntimeError(
                    f"torch made {len(made)} allocations of {sorted(set(made))} bytes, not {MANY} "
                    "of 2 MiB: this torch cuts up memory in another way"
                )
            if self._ours:
                self._check_count(workload)
        self._tensors[workload] = tensors
        self._addresses[workload] = [tensor.data_ptr() for tensor in tensors]
        self.use(workload)
        return sum(tensor.nbytes for tensor in tensors)

    def use(self, workload: str) -> None:
        """Writes to all of the memory, as its user would."""
        tensors = self._tensors[workload]
        for tensor in tensors:
            tensor.fill_(1)
        if [tensor.data_ptr() for tensor in tensors] != self._addresses[workload]:
            raise RuntimeError(f"an address of {workload} moved")

    @staticmethod
    def _segments() -> dict[int, int]:
        """Address and bytes of what torch got for pools other than its own."""
        import torch

        return {
            segment["address"]: segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) != (0, 0)
        }

    @staticmethod
    def _check_count(tag: str) -> None:
        import memsaver

        rows = memsaver.stats()[tag]
        counted = sum(row.allocations for row in rows), sum(row.allocated_bytes for row in rows)
        if counted != (MANY, MANY * 2 * MIB):
            raise RuntimeError(f"memsaver counts {counted} allocations and bytes in {tag}")


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class RawDriver:
    """The driver calls that any library must make, and no more: the limit."""

    def __init__(self, kv_gib: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._kv_gib = kv_gib
        location = Location(1, 0)  # a device, the first
        self._prop = AllocationProp(type=1, location=location)  # pinned
        self._access = AccessDesc(location, 3)  # read and write
        self._ranges: dict[str, tuple[int, list[int]]] = {}
        self._handles: dict[str, list[ctypes.c_uint64]] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def setup(self, workload: str) -> int:
        """Maps as many bytes as the workload has."""
        if workload == "kv":
            total = self._kv_gib * GIB
        elif workload == "discarded":
            total = sum(2 * (s[0] * s[1] if len(s) > 1 else s[0]) for s in decoder_shapes())
        else:
            total = MANY * 2 * MIB
        total = -(-total // (2 * MIB)) * 2 * MIB
        sizes = [min(GIB, total - at) for at in range(0, total, GIB)]
        address = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(total),
            ctypes.c_size_t(GIB),
            zero,
            zero,
        )
        self._ranges[workload] = address.value, sizes
        self.resume(workload)
        self.use(workload)
        return total

    def use(self, workload: str) -> None:
        """Writes to all of the memory."""
        address, sizes = self._ranges[workload]
        self._call(
            "cuMemsetD8_v2",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(1),
            ctypes.c_size_t(sum(sizes)),
        )

    def pause(self, workload: str) -> None:
        """Unmaps and releases."""
        address, sizes = self._ranges[workload]
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(sum(sizes)))
        for handle in self._handles.pop(workload):
            self._call("cuMemRelease", handle)

    def resume(self, workload: str) -> None:
        """Creates and maps."""
        address, sizes = self._ranges[workload]
        handles = self._handles[workload] = []
        at = address
        for size in sizes:
            handle, length = ctypes.c_uint64(), ctypes.c_size_t(size)
            self._call(
                "cuMemCreate",
                ctypes.byref(handle),
                length,
                ctypes.byref(self._prop),
                ctypes.c_uint64(0),
            )
            self._call(
                "cuMemMap",
                ctypes.c_uint64(at),
                length,
                ctypes.c_size_t(0),
                handle,
                ctypes.c_uint64(0),
            )
            handles.append(handle)
            at += size
        self._call(
            "cuMemSetAccess",
            ctypes.c_uint64(address),
            ctypes.c_size_t(sum(sizes)),
            ctypes.byref(self._access),
            ctypes.c_size_t(1),
        )


def timed_ms(call: Callable[[str], Any], workload: str) -> float:
    """Milliseconds of a call, with the device idle before and after."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call(workload)
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) * 1e3, 3)


class Worker:
    """What a child does on request."""

    def __init__(self, name: str, kv_gib: int) -> None:
        import torch

        self._torch = torch
        torch.zeros(1, device="cuda")  # the context
        self._saver = RawDriver(kv_gib) if name == LIMIT else Library(name, kv_gib)

    def _free(self) -> int:
        return int(self._torch.cuda.mem_get_info()[0])

    def setup(self, workload: str) -> dict[str, Any]:
        """Makes the workload's memory and leaves it mapped."""
        size = self._saver.setup(workload)
        self._torch.cuda.synchronize()
        gc.collect()
        gc.freeze()
        gc.disable()  # no collection among 20,000 tensors falls into a measurement
        return {"bytes": size}

    def pause(self, workload: str) -> dict[str, Any]:
        """Pauses a mapped workload."""
        before = self._free()
        milliseconds = timed_ms(self._saver.pause, workload)
        return {"pause_ms": milliseconds, "freed": self._free() - before}

    def resume(self, workload: str) -> dict[str, Any]:
        """Resumes a paused workload and uses its memory."""
        milliseconds = timed_ms(self._saver.resume, workload)
        self._saver.use(workload)
        self._torch.cuda.synchronize()
        return {"resume_ms": milliseconds}

    def at_once(self, workload: str) -> dict[str, Any]:
        """Pauses a mapped workload, and resumes it without a wait."""
        paused = timed_ms(self._saver.pause, workload)
        resumed = timed_ms(self._saver.resume, workload)
        self._saver.use(workload)
        self._torch.cuda.synchronize()
        return {"pause_ms": paused, "resume_ms": resumed}

    def bandwidth(self, workload: str) -> dict[str, Any]:
        """GB/s of a kernel that reads one tensor and writes another, for memory of each kind."""
        import memsaver

        torch, items, turns = self._torch, GIB, 40

        def pair() -> tuple[Any, Any]:
            source = torch.empty(items, dtype=torch.float32, device="cuda").fill_(1)
            return source, torch.empty_like(source)

        def speed(source: Any, target: Any) -> float:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.add(source, 1, out=target)
            end.record()
            end.synchronize()
            return float(2 * source.nbytes / 1e6 / begin.elapsed_time(end))

        with memsaver.region(workload):
            ours = pair()
        plain = pair()

        def turn_about() -> dict[str, list[float]]:
            found: dict[str, list[float]] = {"region": [], "plain": []}
            for turn in range(turns + 5):
                order = [("region", ours), ("plain", plain)]
                for name, tensors in order[:: 1 if turn % 2 else -1]:
                    value = speed(*tensors)
                    if turn >= 5:  # the first ones bring the clocks up
                        found[name].append(round(value, 1))
            return found

        fresh = turn_about()
        memsaver.pause(workload)
        memsaver.resume(workload)
        ours[0].fill_(1)
        return {"fresh": fresh, "resumed": turn_about()}


def serve(name: str, kv_gib: int) -> None:
    """Answers requests, one JSON line each, until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    with contextlib.suppress(ImportError):  # the first request will say so
        import torch  # noqa: F401 - all children take their seconds for this at the same time
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if worker is None:
                worker = Worker(name, kv_gib)
            reply = getattr(worker, request["do"])(request["workload"])
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    os._exit(0)  # memory is still paused: not every library can free that at exit


# --- the parent ----------------------------------------------------------------------------------


class Failed(Exception):
    """A child could not do what it was asked."""


class Child:
    """A process that serves."""

    def __init__(self, name: str, kv_gib: int) -> None:
        self.name = name
        env = {
            key: value
            for key, value in os.environ.items()
            # torch's settings change what memory it asks for; torch_memory_saver refuses some.
            if key not in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", name, "--kv-gib", str(kv_gib)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, do: str, workload: str) -> dict[str, Any]:
        """Sends a request and waits for its reply."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"do": do, "workload": workload}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{self.name} ended early") from None
        if not select.select([self._process.stdout], [], [], REPLY_SECONDS)[0]:
            self._process.kill()
            raise Failed(f"{self.name} did not answer {do} {workload} in {REPLY_SECONDS} s")
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"{self.name} ended in {do} {workload}, status {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            print(reply["trace"], file=sys.stderr)
            raise Failed(f"{self.name}, {do} {workload}: {reply['error']}")
        return reply

    def close(self) -> None:
        """Lets the process end, or ends it."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


Times = dict[str, dict[str, list[float]]]  # by child, by "pause_ms" and "resume_ms"


def take_turns(
    children: list[Child], workload: str, cycles: int, gap: float
) -> tuple[Times, Times]:
    """Every child's times with the wait and without it. All are left paused."""
    spaced: Times = {child.name: {"pause_ms": [], "resume_ms": []} for child in children}
    at_once: Times = {child.name: {"pause_ms": [], "resume_ms": []} for child in children}

    sizes: dict[str, int] = {}

    def pause(child: Child) -> None:
        reply = child.ask("pause", workload)
        freed, size = reply["freed"], sizes[child.name]
        if freed < 0.98 * size:
            raise Failed(f"{child.name} gave back {freed} of {size} bytes of {workload}")
        spaced[child.name]["pause_ms"].append(reply["pause_ms"])
        time.sleep(gap)

    for child in children:
        sizes[child.name] = child.ask("setup", workload)["bytes"]
        pause(child)
    for cycle in range(cycles):
        first = cycle % len(children)
        for child in children[first:] + children[:first]:
            spaced[child.name]["resume_ms"].append(child.ask("resume", workload)["resume_ms"])
            pause(child)
    for child in children:
        child.ask("resume", workload)
        for _ in range(cycles):
            reply = child.ask("at_once", workload)
            for key, values in at_once[child.name].items():
                values.append(reply[key])
        child.ask("pause", workload)
        time.sleep(gap)
    return spaced, at_once


def label(workload: str, kv_gib: int) -> str:
    """The workload in the name of a metric."""
    return {"kv": f"kv_{kv_gib}GiB", "discarded": "discarded_16GB", "many": "many_10k"}[workload]


def measurements(workload: str, kv_gib: int, times: Times, suffix: str) -> list[dict[str, Any]]:
    """A row for each of pause and resume, and each peer."""
    rows = []
    for key in ("pause_ms", "resume_ms"):
        median = {name: round(statistics.median(found[key]), 3) for name, found in times.items()}
        for name, peer in PEERS.items():
            if name not in times:
                continue
            rows.append(
                {
                    "bench": "pause_resume",
                    "metric": f"{label(workload, kv_gib)}_{key.removesuffix('_ms')}{suffix}_ms",
                    "memsaver": median[OURS],
                    "peer": peer,
                    "peer_value": median[name],
                    "ratio": results.ratio(median[OURS], median[name]),
                    "limit": median.get(LIMIT),
                    "detail": {
                        "memsaver": times[OURS][key],
                        "peer": times[name][key],
                        "limit": times[LIMIT][key],
                    },
                }
            )
    return rows


def bandwidth_rows(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Bandwidth on region memory in percent of that on plain memory; GB/s are in the detail."""
    rows = []
    for when, speeds in found.items():
        plain = statistics.median(speeds["plain"])
        percent = round(100 * statistics.median(speeds["region"]) / plain, 2)
        rows.append(
            {
                "bench": "pause_resume",
                "metric": "region_bandwidth" + ("" if when == "fresh" else f"_{when}"),
                "memsaver": percent,
                "peer": "plain memory",
                "peer_value": 100.0,
                "ratio": results.ratio(percent, 100.0, higher_is_better=True),
                "limit": None,
                "detail": {"memsaver_GBps": speeds["region"], "peer_GBps": speeds["plain"]},
            }
        )
    return rows


def hook_rows() -> list[dict[str, Any]]:
    """The rows of hook_overhead.py, with the ratio and the keys that all rows have."""
    try:
        from hook_overhead import measure
    except ImportError as error:
        print(f"hook: left out, hook_overhead.py cannot be used ({error})", file=sys.stderr)
        return []
    try:
        found = measure()
    except RuntimeError as error:
        raise Failed(f"hook: {error}") from None
    return [
        {**row, "ratio": results.ratio(row["memsaver"], row["peer_value"]), "limit": None}
        for row in found
    ]


def goal(metric: str) -> float | None:
    """The least ratio wanted for a metric, if there is one."""
    if "_at_once" in metric:
        return None
    return next((least for start, least in GOALS.items() if metric.startswith(start)), None)


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", "memsaver", "peer", "peer's", "driver", "ratio", "goal", "met")
    for name in ("memsaver", "peer's", "driver", "ratio", "goal"):
        next(column for column in table.columns if column.header == name).justify = "right"
    for row in rows:
        least = goal(row["metric"])
        met = "" if least is None else "yes" if row["ratio"] >= least else "[bold red]not met"
        table.add_row(
            row["metric"],
            f"{row['memsaver']:.2f}",
            row["peer"],
            f"{row['peer_value']:.2f}",
            "" if row["limit"] is None else f"{row['limit']:.2f}",
            f"{row['ratio']:.3f}",
            "" if least is None else f"{least:.3f}",
            met,
        )
    width = None if sys.stdout.isatty() else 140
    Console(width=width).print(table)


def run(options: argparse.Namespace) -> int:
    """Measures what was asked for; an exit status."""
    only = options.only
    workloads = [name for name in WORKLOADS if name in only]
    if options.peer and workloads and importlib.util.find_spec("torch_memory_saver") is None:
        print(
            "torch_memory_saver is not installed, so there is nothing to compare with: put its "
            "wheel (0.0.10), unpacked, into PYTHONPATH, or measure memsaver alone with --no-peer",
            file=sys.stderr,
        )
        return 2
    names = [OURS, LIMIT, *(PEERS if options.peer else ())] if workloads else []
    if "bandwidth" in only and not names:
        names = [OURS]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with contextlib.ExitStack() as stack:
        children = []
        for name in names:
            children.append(Child(name, options.kv_gib))
            stack.callback(children[-1].close)
        for workload in workloads:
            try:
                spaced, at_once = take_turns(children, workload, options.cycles, options.gap)
            except Failed as error:
                failures.append(str(error))
                continue
            for times, suffix in ((spaced, ""), (at_once, "_at_once")):
                rows += measurements(workload, options.kv_gib, times, suffix)
                if not options.peer:
                    for name, found in times.items():
                        print(f"{label(workload, options.kv_gib)}{suffix} {name}: {found}")
        if "bandwidth" in only:
            try:
                rows += bandwidth_rows(children[0].ask("bandwidth", "bandwidth"))
            except Failed as error:
                failures.append(str(error))
    if "hook" in only:  # when no other process uses the device
        try:
            rows += hook_rows()
        except Failed as error:
            failures.append(str(error))
    if rows:
        show(rows)
        count = results.write(options.output, rows, results.stamp())
        print(f"{options.output}: {count} rows, {len(rows)} of them from this run")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parts(text: str) -> list[str]:
    """The value of --only."""
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown or not chosen:
        raise argparse.ArgumentTypeError(f"choose from {', '.join(PARTS)}, separated by commas")
    return chosen


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kv-gib", type=int, default=64, help="GiB of the kv workload")
    parser.add_argument("--cycles", type=int, default=15, help="cycles of each kind")
    parser.add_argument("--gap", type=float, default=0.5, help="seconds before a resume")
    parser.add_argument("--only", type=parts, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--output", type=Path, default=results.DEFAULT_PATH)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.worker, options.kv_gib)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
