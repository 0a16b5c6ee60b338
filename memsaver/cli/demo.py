"""`memsaver demo`: pause an engine and use its memory, on a GPU or on the simulated driver.

A trainer uses the memory of a paused rollout engine, which has weights with a backup, a KV cache,
and the pool of a CUDA graph. The engine then resumes in two stages. The demo checks every claim
about bytes, addresses, and the free memory that the driver reports.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import typer

import memsaver
from memsaver._memory.torch_mode import torch_pools
from memsaver._runtime.native import _C
from memsaver._runtime.text import size_text
from memsaver.cli.failures import FAILURE, INTERRUPTED, USAGE, complain, fail
from memsaver.cli.marks import marks_for
from memsaver.cli.tables import (
    Groups,
    add_columns,
    folded,
    is_narrow,
    is_redrawable,
    output_console,
    simple_box,
)
from memsaver.errors import ConfigError, MemsaverError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["command", "run"]

TAGS = ("weights", "kv_cache", "cuda_graph")
_NAMES = {"weights": "weights", "kv_cache": "kv_cache", "cuda_graph": "graph"}
_WIDE: Groups = (("step",), ("ms",), *((name,) for name in _NAMES.values()), ("free",))
_NARROW: Groups = (("step",), ("ms", "free"), tuple(_NAMES.values()))
_WIDTH, _FIGURE = 80, 8  # characters: the table's maximum width, and a number column's width
MIB = 1 << 20
GIB = 1 << 30


def command() -> None:
    """Demonstrate a pause, another use of the memory, and a resume in two stages, with checks.

    The demo runs on the GPU if there is a GPU that torch supports, otherwise on the simulated
    driver.

    Ctrl-C waits for the pause or resume in progress. A second Ctrl-C kills the process at once.
    """
    try:
        raise typer.Exit(run(output_console()))
    except MemsaverError as error:
        status = USAGE if isinstance(error, ConfigError) else FAILURE  # an invalid variable
        fail("memsaver demo", str(error), status)


class Workload(Protocol):
    """The workload of a demo run: an engine's tensors, and a trainer that needs their memory."""

    title: str
    limits: str
    unit: int  # in bytes; the trainer allocates a multiple of this

    def build(self) -> None:
        """Allocate the weights, the KV cache and the graph in their regions."""

    def addresses(self) -> list[int]:
        """Return the addresses of the tensors."""

    def weights_intact(self) -> bool:
        """Return whether every byte of the weights is unchanged since `build`."""

    def output(self) -> Any:
        """Return the result of one decode step, which can be compared with ==. Needs all tags
        mapped.
        """

    def train(self, nbytes: int) -> int:
        """Allocate, use and free `nbytes` of device memory, and return the minimum free memory."""


class GpuWorkload:
    """A workload on the GPU: the projections of a small torch decoder, with the decode step in a
    CUDA graph.
    """

    limits = "Everything here is real: torch's tensors, a CUDA graph, the driver's figures."
    unit = GIB

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"

    def build(self) -> None:
        """Build 2 GiB of bf16 weights, a KV cache of 4 GiB, and one captured decode step."""
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
        self._step()  # the libraries allocate their workspaces outside the capture
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
        """Return the addresses of all tensors that the graph uses."""
        return [t.data_ptr() for t in [*self.weights, *self.kv, self.result]]

    def weights_intact(self) -> bool:
        """Return whether the weights equal copies outside any region, compared on the GPU."""
        pairs = zip(self.weights, self.copies, strict=True)
        return all(self.torch.equal(weight, copy) for weight, copy in pairs)

    def output(self) -> Any:
        """Replay the graph, and return its output."""
        self.graph.replay()
        return self.result.cpu().tolist()

    def train(self, nbytes: int) -> int:
        """Fill, use and free a trainer's tensors."""
        torch = self.torch
        whole = dict(dtype=torch.uint8, device="cuda")
        tensors = [torch.full((GIB,), 3, **whole) for _ in range(nbytes // GIB)]
        assert all(int(t[-1]) == 3 for t in tensors)
        free = memsaver.device_memory()[0]
        del tensors
        torch.cuda.empty_cache()
        return free


class SimulatedWorkload:
    """The steps of `GpuWorkload` on the simulated driver, with buffers instead of tensors."""

    limits = (
        "Simulated: memory, addresses, contents and the driver's accounting behave as on a GPU, "
        "and paused memory faults when touched.\nIt cannot show kernels, CUDA graphs, torch's "
        "allocator, or the speed of anything: the times are this CPU's."
    )
    unit = 64 * MIB

    def __init__(self, why: str) -> None:
        self.title = f"the simulated driver ({why})"

    def build(self) -> None:
        """Build 128 MiB of weights, a KV cache of 256 MiB, and a third tag for a graph's pool."""
        from memsaver import simulator

        with memsaver.region("weights", backup="host"):
            self.weights = [simulator.buffer(4 * MIB) for _ in range(32)]
        with memsaver.region("kv_cache", backup="host"):
            self.kv = [simulator.buffer(32 * MIB) for _ in range(8)]
        with memsaver.region("cuda_graph", backup="none"):
            self.scratch = simulator.buffer(32 * MIB)
        noise = random.Random(0)
        for buffer in [*self.weights, *self.kv]:
            for at in range(0, buffer.nbytes, 16 * MIB):
                ctypes.memmove(buffer.address + at, noise.randbytes(MIB), MIB)
        self.built = self._checksum(self.weights)

    def addresses(self) -> list[int]:
        """Return the addresses of all buffers of the workload."""
        return [b.address for b in [*self.weights, *self.kv, self.scratch]]

    def weights_intact(self) -> bool:
        """Return whether the checksum of all weights, in order, is unchanged since `build`."""
        return self._checksum(self.weights) == self.built

    def output(self) -> Any:
        """Return a checksum of the weights and the KV cache, instead of a decode step's result."""
        return self._checksum([*self.weights, *self.kv])

    @staticmethod
    def _checksum(buffers: list[Any]) -> int:
        value = 0
        for buffer in buffers:
            value = zlib.crc32(buffer.array, value)
        return value

    def train(self, nbytes: int) -> int:
        """Allocate, use and free a trainer's memory, in a separate tag."""
        from memsaver import simulator

        with memsaver.region("trainer", backup="none"):
            taken = simulator.buffer(nbytes)
        ctypes.memset(taken.address, 3, MIB)
        return memsaver.device_memory()[0]


class Show:
    """The steps of the demo, each printed as a table row when it ends, and the failed checks."""

    def __init__(self, console: Console) -> None:
        self.failures: list[str] = []
        self._console = console
        self._groups = _NARROW if is_narrow(console) else _WIDE
        self._marks = marks_for(console)
        console.print("MiB resident per tag, and free on the device\n")
        console.print(self._table(header=True))

    def step(self, name: str, action: Callable[[], object], check: Callable[[], str]) -> None:
        """Run and time a step, and add a row with the memory use after the step.

        If the action returns a transition, the method waits for the transition. If the user
        interrupts the step, the method prints whether the process waits for the transition, and
        exits with status 130.
        """
        result = None
        try:
            start = time.perf_counter()
            result = action()
            if isinstance(result, memsaver.Transition):
                result.wait()
            self._add_row(name, time.perf_counter() - start, check)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one kills at once
            text = f"interrupted in the step {name!r}"
            if isinstance(result, memsaver.Transition) and not result.done():
                text += ": waiting for its end (Ctrl-C again does not wait)"
            complain("memsaver demo", text)
            raise SystemExit(
                INTERRUPTED
            ) from None  # the interpreter waits for the transition before it exits

    def _add_row(self, name: str, seconds: float, check: Callable[[], str]) -> None:
        from rich.text import Text

        try:
            checked = Text.assemble((self._marks["good"], "green"), " ", (check(), "dim"))
        except AssertionError as error:
            checked = Text(f"{self._marks['bad']} {error}", style="red")
            self.failures.append(f"{name}: {error}")
        held = {row.tag: row for row in memsaver.stats().tags}
        free = memsaver.device_memory()[0] / MIB
        cells: dict[str, Text | str] = {
            "step": Text.assemble(name, "\n", checked),
            "ms": f"{seconds * 1e3:,.1f}",
            "free": f"{free:,.0f}",
        }
        for tag in TAGS:
            nbytes = held[tag].resident_bytes if tag in held else 0
            cells[_NAMES[tag]] = Text(f"{nbytes / MIB:,.0f}", style="" if nbytes else "dim")
        table = self._table()
        table.add_row(*folded(self._groups, cells))
        self._console.print(table)

    def _table(self, header: bool = False) -> Table:
        """Return a table without rows.

        The column widths are the same in all tables that this method returns.
        """
        from rich.table import Table

        table = Table(
            box=simple_box(self._console),
            show_header=header,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            width=min(self._console.width, _WIDTH),
        )
        add_columns(table, self._groups, least=8)
        table.columns[0].ratio = 1
        for column in table.columns[1:]:
            column.width = _FIGURE
        return table


def choose_workload() -> Workload:
    """Return the GPU workload if torch supports the GPU, otherwise the simulated workload.

    This function must be called before the driver is opened, because it may choose the simulated
    driver for the process.
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
    """Run and print the demo. Returns the exit status, which is 0 if every check passed, otherwise
    1.
    """
    work = choose_workload()
    console.print(f"[bold]memsaver {memsaver.__version__}[/] on {work.title}\n{work.limits}\n")
    show = Show(console)
    show.step("build the engine", work.build, lambda: "three tags")
    where, reference = work.addresses(), work.output()
    held = memsaver.stats().resident_bytes  # the engine's tags; the trainer's is created later
    free = memsaver.device_memory()[0]
    lent = held // work.unit * work.unit

    def is_free() -> str:
        grown = memsaver.device_memory()[0] - free
        assert grown >= 0.98 * held, f"only {size_text(grown)} of {size_text(held)} became free"
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
    bar = is_redrawable(sys.stderr) or None

    def is_used() -> str:
        is_free()
        taken = free + held - lows[-1]
        assert taken >= 0.98 * lent, f"the driver reports that {size_text(taken)} were allocated"
        return f"{taken / MIB:,.0f} MiB lent, and back"

    for cycle in (1, 2):
        console.print()
        show.step(
            f"pause the engine ({cycle})",
            lambda: memsaver.pause(*TAGS, wait=False, progress=bar),
            is_free,
        )
        show.step("a trainer uses the memory", lambda: lows.append(work.train(lent)), is_used)
        show.step(
            "resume weights",
            lambda: memsaver.resume("weights", wait=False, progress=bar),
            weights_only,
        )
        show.step(
            "resume the rest", lambda: memsaver.resume(*TAGS, wait=False, progress=bar), all_back
        )

    console.print()
    if show.failures:
        console.print("[red]failed:[/] " + "; ".join(show.failures))
        return 1
    console.print("[green]every check passed[/]")
    return 0
