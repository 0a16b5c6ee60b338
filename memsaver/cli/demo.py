"""`memsaver demo`: the main job in front of your eyes, on the GPU or on the simulated driver.

A rollout engine's memory (weights with a backup, a KV cache, a CUDA graph's pool) is given to a
trainer and comes back in two stages. Every claim is checked while it runs: bytes, addresses, and
the free memory that the driver itself reports.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import typer

import memsaver
from memsaver.cli.marks import marks_for
from memsaver.errors import MemsaverError
from memsaver.native import _C
from memsaver.torch_mode import torch_pools

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["command", "run"]

TAGS = ("weights", "kv_cache", "cuda_graph")
MIB = 1 << 20
GIB = 1 << 30


def command() -> None:
    """Show the main job: pause, lend the memory, resume in two stages, with every claim checked.

    On the GPU where there is one and a torch for it, else on the simulated driver.
    """
    from rich.console import Console

    try:
        raise typer.Exit(run(Console()))
    except MemsaverError as error:
        typer.echo(f"memsaver demo: {error}", err=True)
        raise typer.Exit(1) from None


class Workload(Protocol):
    """What a demo run works on: an engine's tensors, and a trainer that wants their memory."""

    title: str
    limits: str

    def build(self) -> None:
        """Allocate weights, KV cache and graph in their regions."""

    def addresses(self) -> list[int]:
        """Where the tensors lie."""

    def weights_intact(self) -> bool:
        """Whether every byte of the weights is what it was when they were built."""

    def output(self) -> Any:
        """One decode step's result, comparable with ==. Needs everything resident."""

    def train(self, nbytes: int) -> int:
        """Take that much device memory, use it, give it back; what was free meanwhile."""


class GpuWorkload:
    """A small transformer decoder's projections in torch, its decode step in a CUDA graph."""

    limits = "Everything here is real: torch's tensors, a CUDA graph, the driver's figures."

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"

    def build(self) -> None:
        """Two GiB of bf16 weights, four GiB of KV cache, one captured decode step."""
        torch = self.torch
        torch.manual_seed(0)
        width, layers, tokens = 4096, 32, 4096
        half = dict(device="cuda", dtype=torch.bfloat16)
        self.input = torch.randn(8, width, **half)
        with memsaver.region("weights", backup="host"):
            self.weights = [torch.randn(width, 2 * width, **half) / 64 for _ in range(layers)]
        self.copies = [weight.clone() for weight in self.weights]
        with memsaver.region("kv_cache", backup="host"):
            self.kv = [torch.randn(8, tokens, 2 * width, **half) for _ in range(8)]
        torch.cuda.synchronize()
        self._step()  # the libraries make their workspaces outside the capture
        self.graph = torch.cuda.CUDAGraph()
        with memsaver.graph(self.graph, tag="cuda_graph"):
            self.result = self._step()

    def _step(self) -> Any:
        torch = self.torch
        hidden = self.input
        for index, weight in enumerate(self.weights):
            query, value = (hidden @ weight).chunk(2, dim=1)
            cache = self.kv[index % len(self.kv)]
            keys, values = cache.chunk(2, dim=2)
            scores = torch.softmax((keys @ query.unsqueeze(2)).squeeze(2).float() / 64, dim=1)
            mixed = (scores.to(values.dtype).unsqueeze(1) @ values).squeeze(1)
            hidden = torch.nn.functional.normalize(mixed + value, dim=1) * 64
        return hidden

    def addresses(self) -> list[int]:
        """Of every tensor that the graph refers to."""
        return [t.data_ptr() for t in [*self.weights, *self.kv, self.result]]

    def weights_intact(self) -> bool:
        """Compared on the GPU with copies outside of any region."""
        pairs = zip(self.weights, self.copies, strict=True)
        return all(self.torch.equal(weight, copy) for weight, copy in pairs)

    def output(self) -> Any:
        """The graph's output, replayed."""
        self.graph.replay()
        return self.result.cpu().tolist()

    def train(self, nbytes: int) -> int:
        """A trainer's tensors: filled, used, freed."""
        torch = self.torch
        whole = dict(dtype=torch.uint8, device="cuda")
        tensors = [torch.full((GIB,), 3, **whole) for _ in range(nbytes // GIB)]
        assert all(int(t[-1]) == 3 for t in tensors)
        free = memsaver.device_memory()[0]
        del tensors
        torch.cuda.empty_cache()
        return free


class SimulatedWorkload:
    """The same steps on the simulated driver, with buffers in place of tensors."""

    limits = (
        "Simulated: memory, addresses, contents and the driver's accounting behave as on a GPU, "
        "and paused memory faults when touched.\nIt cannot show kernels, CUDA graphs, torch's "
        "allocator, or the speed of anything: the times are this CPU's."
    )

    def __init__(self, why: str) -> None:
        self.title = f"the simulated driver ({why})"

    def build(self) -> None:
        """Half a GiB of weights, one GiB of KV cache, a third tag where a graph's pool would be."""
        from memsaver import simulator

        with memsaver.region("weights", backup="host"):
            self.weights = [simulator.buffer(16 * MIB) for _ in range(32)]
        with memsaver.region("kv_cache", backup="host"):
            self.kv = [simulator.buffer(128 * MIB) for _ in range(8)]
        with memsaver.region("cuda_graph"):
            self.scratch = simulator.buffer(32 * MIB)
        noise = random.Random(0)
        for buffer in [*self.weights, *self.kv]:
            for at in range(0, buffer.nbytes, 16 * MIB):
                ctypes.memmove(buffer.address + at, noise.randbytes(MIB), MIB)
        self.built = self._checksum(self.weights)

    def addresses(self) -> list[int]:
        """Of every buffer."""
        return [b.address for b in [*self.weights, *self.kv, self.scratch]]

    def weights_intact(self) -> bool:
        """By a checksum over every byte, in order."""
        return self._checksum(self.weights) == self.built

    def output(self) -> Any:
        """A checksum over weights and KV cache stands in for a decode step."""
        return self._checksum([*self.weights, *self.kv])

    @staticmethod
    def _checksum(buffers: list[Any]) -> int:
        value = 0
        for buffer in buffers:
            value = zlib.crc32(buffer.array, value)
        return value

    def train(self, nbytes: int) -> int:
        """A trainer's memory, in a tag of its own."""
        from memsaver import simulator

        with memsaver.region("trainer"):
            taken = simulator.buffer(nbytes)
        ctypes.memset(taken.address, 3, MIB)
        return memsaver.device_memory()[0]


@dataclass
class Show:
    """The table, and the checks that did not hold."""

    table: Table
    marks: dict[str, str]
    failures: list[str] = field(default_factory=list)

    def step(self, name: str, action: Callable[[], object], check: Callable[[], str]) -> None:
        """Run a step, time it, and add what memory looks like after it."""
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
        try:
            checked = f"[green]{self.marks['good']}[/] [dim]{check()}[/]"
        except AssertionError as error:
            checked = f"[red]{self.marks['bad']} {error}[/]"
            self.failures.append(f"{name}: {error}")
        held = {row.tag: row for row in memsaver.stats().tags}
        cells = []
        for tag in TAGS:
            row = held.get(tag)
            mib = row.resident_bytes / MIB if row else 0
            cells.append(f"{mib:,.0f}" if row and row.resident_bytes else "[dim]0[/]")
        free = memsaver.device_memory()[0] / MIB
        self.table.add_row(f"{name}\n{checked}", f"{seconds * 1e3:,.1f}", *cells, f"{free:,.0f}")


def choose_workload() -> Workload:
    """The GPU's where there is a GPU and a torch for it, else the simulated driver's.

    Must be asked before anything opens the driver: it may choose the simulated one for the process.
    """
    why = "MEMSAVER_DRIVER=sim"
    if not os.environ.get("MEMSAVER_DRIVER"):
        try:
            import torch

            pools = torch_pools(required=False) if torch.cuda.is_available() else None
            if pools is not None:
                return GpuWorkload(pools.torch)
            why = "torch finds no GPU here"
        except ImportError:
            why = "torch is not installed"
        os.environ["MEMSAVER_DRIVER"] = "sim"
    if _C.driver_info()[2]:
        return SimulatedWorkload(why)
    found = torch_pools()
    if found is None:
        raise memsaver.NotLoadedError("the demo needs a torch with CUDA for this driver")
    return GpuWorkload(found.torch)


def run(console: Console) -> int:
    """Run the demo and print it; the exit status: 0 if every check held, else 1."""
    import rich.box
    from rich.table import Table

    work = choose_workload()
    console.print(f"[bold]memsaver {memsaver.__version__}[/] on {work.title}\n{work.limits}\n")
    table = Table(
        box=rich.box.ASCII2 if console.options.ascii_only else rich.box.SIMPLE_HEAD,
        title="MiB resident per tag, and what the driver says is free",
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("step", ratio=1)
    for name in ("ms", "weights", "kv_cache", "graph", "free"):
        table.add_column(name, justify="right", no_wrap=True)
    show = Show(table, marks_for(console))

    show.step("build the engine", work.build, lambda: "three tags")
    where, reference = work.addresses(), work.output()
    held = memsaver.stats().resident_bytes  # of the engine: the trainer comes later
    free = memsaver.device_memory()[0]
    lent = held // GIB * GIB

    def is_free() -> str:
        grown = memsaver.device_memory()[0] - free
        assert grown >= 0.98 * held, f"only {grown} of {held} bytes came free"
        return f"{100 * grown / held:.1f} % of its bytes free"

    def weights_only() -> str:
        assert work.weights_intact(), "the weights changed"
        assert memsaver.state("kv_cache") == "paused", "the KV cache woke too"
        return "every byte; no KV cache yet"

    def all_back() -> str:
        assert work.addresses() == where, "an address moved"
        assert work.output() == reference, "the output changed"
        return f"{len(where)} addresses, same output"

    lows: list[int] = []
    bar = True if sys.stderr.isatty() else None

    def is_used() -> str:
        is_free()
        taken = free + held - lows[-1]
        assert taken >= 0.98 * lent, f"the driver says {taken} bytes were taken"
        return f"{taken / MIB:,.0f} MiB lent, and back"

    for cycle in (1, 2):
        show.table.add_section()
        show.step(
            f"pause the engine ({cycle})", lambda: memsaver.pause(*TAGS, progress=bar), is_free
        )
        show.step("a trainer uses the memory", lambda: lows.append(work.train(lent)), is_used)
        show.step("resume weights", lambda: memsaver.resume("weights", progress=bar), weights_only)
        show.step("resume the rest", lambda: memsaver.resume(*TAGS, progress=bar), all_back)

    console.print(show.table)
    if show.failures:
        console.print("[red]did not hold:[/] " + "; ".join(show.failures))
        return 1
    console.print("[green]every check held[/]")
    return 0
