"""Allocations, frees, queries and first uses under faults."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

from faults.machine import MIB, Machine
from faults.scenario import SMALL_GRANULE, Scenario, require


class Allocate(Scenario):
    """Allocations of several sizes. Some allocations need a new span, and some or all allocations
    need new memory.
    """

    def __init__(self, machine: Machine, name: str, nbytes: int, new_tags: bool = False) -> None:
        super().__init__(machine, name)
        self.nbytes, self.new_tags = nbytes, new_tags
        if new_tags:  # a tag's addresses stay reserved
            self.grows = frozenset({"reservations", "reserved_bytes"})
        self.tag, self.made = "", 0
        self.got: list[Any] = []

    def prepare(self) -> None:
        self.held = self.bystander.held()
        if self.new_tags or not self.tag:
            self.made += 1
            self.tag = f"new-{self.made}-of-{self.name}"
            with self.memsaver.region(self.tag):
                pass

    def act(self) -> None:
        with self.memsaver.region(self.tag):
            self.got.append(self.memsaver.simulator.buffer(self.nbytes))

    def check_unchanged(self, error: Exception) -> None:
        self.check_bystander()
        require(not self.got, "an allocation failed and gave memory")
        require(self.memsaver.ranges(self.tag) == (), "an allocation failed and is in the tag")
        require(self.memsaver.state(self.tag) == "mapped", "the tag is not mapped")

    def check_done(self) -> None:
        (block,) = self.got
        for at in (0, self.nbytes - 1):
            self.sim.write(block.address + at, b"x")
        require(len(self.memsaver.ranges(self.tag)) == 1, "the allocation is not in the tag")
        self.check_bystander()

    def rest(self) -> None:
        self.got.clear()
        super().rest()


class PoolAllocate(Allocate):
    """An allocation through the function for torch's pools, which returns null on failure."""

    def act(self) -> None:
        from memsaver._runtime.native import _C

        malloc, _ = _C.torch_allocator(self.tag, -1)
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        address = kind(malloc)(self.nbytes, 0, None)
        if address:
            self.got.append(_Given(address))

    def check_done(self) -> None:
        from memsaver._runtime.native import _C

        if not self.got:
            while _C.next_warning() is not None:
                pass  # the reason, if there was memory for its text
            self.check_unchanged(MemoryError())
            self.act()
        super().check_done()


class _Given:
    """Memory at an address, which this object frees when it is deleted."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __del__(self) -> None:
        from memsaver._runtime.native import _C

        _C.free(self.address)


class Captured(Allocate):
    """An allocation and a free while the program captures a graph. The capture must stay valid."""

    def __init__(self, machine: Machine, name: str) -> None:
        super().__init__(machine, name, 3 * MIB)
        self.stack = contextlib.ExitStack()

    def prepare(self) -> None:
        super().prepare()
        with self.memsaver.region(self.tag):
            self.old = self.memsaver.simulator.buffer(64 * MIB)
        self.stream = self.stack.enter_context(self.sim.stream())
        require(self.sim.opened.cuStreamBeginCapture_v2(self.stream, 0) == 0, "no capture")

    def act(self) -> None:
        super().act()
        self.old = None

    def check_unchanged(self, error: Exception) -> None:
        self.check_bystander()
        require(not self.got, "an allocation failed and gave memory")

    def check_done(self) -> None:
        (block,) = self.got
        self.sim.memset(block.address, 5, self.nbytes, self.stream)
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        library = self.sim.opened
        ended = library.cuStreamEndCapture(self.stream, ctypes.byref(graph))
        require(ended == 0, f"the capture was broken: {ended}")
        library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        library.cuGraphDestroy(graph)
        self.memsaver.pause(self.tag)
        self.memsaver.resume(self.tag)
        library.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        require(library.cuGraphLaunch(executable, self.stream) == 0, "the graph does not replay")
        library.cuStreamSynchronize(self.stream)
        contents = self.sim.read(block.address, self.nbytes)
        require(contents == bytes([5]) * self.nbytes, "the graph did not reach its memory")
        library.cuGraphExecDestroy.argtypes = [ctypes.c_void_p]
        library.cuGraphExecDestroy(executable)
        self.stack.close()
        super().check_done()


class Free(Scenario):
    """Frees of mapped or paused memory, or during a pause. A free never fails for its caller."""

    def __init__(self, machine: Machine, name: str, when: str) -> None:
        super().__init__(machine, name)
        self.when = when
        self.kept = self.group("kept", "host")
        self.kept.names = [f"tag-of-{name}"]
        self.going: list[int] = []

    def build(self) -> None:
        super().build()
        self.kept.allocate([4096, 2 * MIB])
        self.kept.fill()

    def prepare(self) -> None:
        from memsaver._runtime.native import _C

        with self.memsaver.region(self.kept.names[0]):
            self.going = [_C.malloc(nbytes) for nbytes in (2 * MIB, 64 * MIB, 4096)]
        if self.when == "paused":
            self.memsaver.pause(*self.kept.names)

    def act(self) -> None:
        from memsaver._runtime.native import _C

        pause = None
        if self.when == "meanwhile":
            pause = self.memsaver.pause(*self.kept.names, wait=False)
        try:
            while self.going:
                _C.free(self.going[-1])
                self.going.pop()
        finally:
            if pause is not None:
                pause.wait()

    def check_unchanged(self, error: Exception) -> None:
        # The pause may have failed, or a free that had no memory for its error, but never partly.
        self.check_bystander()
        require(len(self.memsaver.ranges(self.kept.names[0])) == 2 + len(self.going), "lost blocks")
        if self.kept.states() == {"mapped"}:
            require(self.kept.is_intact(), "contents are lost")

    def check_done(self) -> None:
        require(len(self.memsaver.ranges(self.kept.names[0])) == 2, "not all was freed")
        self.check_bystander()

    def rest(self) -> None:
        self.memsaver.resume(*self.kept.names)
        require(self.kept.is_intact(), "contents of what was not freed are lost")
        # The next call for the tag retries failed releases.
        with self.memsaver.region(self.kept.names[0]):
            self.memsaver.simulator.buffer(4096)
        super().rest()


class Ask(Scenario):
    """Calls that change only caches: fingerprints, statistics, views and trim."""

    granule = SMALL_GRANULE

    def __init__(
        self, machine: Machine, name: str, ask: Callable[[Ask], object], paused: bool = False
    ) -> None:
        super().__init__(machine, name)
        self.ask, self.paused = ask, paused
        self.tags = self.group("asked", "host")
        self.pageable = self.group("pageable", "pageable")

    def build(self) -> None:
        super().build()
        for group in (self.tags, self.pageable):
            group.allocate(self.sizes)
            group.fill()
        self.names = [*self.tags.names, *self.pageable.names]

    def prepare(self) -> None:
        self.memsaver.pause(*self.names)
        if not self.paused:
            self.memsaver.resume(*self.names)
        self.answer: object = None

    def act(self) -> None:
        self.answer = self.ask(self)

    def check_unchanged(self, error: Exception) -> None:
        self.check_bystander()
        for group in (self.tags, self.pageable):
            expected = "paused" if self.paused else "mapped"
            require(group.states() == {expected}, f"{group.names} are {group.states()}")
            require(self.paused or group.is_intact(), "contents are lost")

    def check_done(self) -> None:
        self.check_unchanged(RuntimeError())

    def rest(self) -> None:
        self.memsaver.resume(*self.names)
        self.check_bystander()
        require(self.tags.is_intact() and self.pageable.is_intact(), "contents are lost")
        super().rest()


class FirstUse(Scenario):
    """A process's first use of a device or its first pause, with the tags' backup or another
    backup.
    """

    fresh = True

    def __init__(
        self, machine: Machine, name: str, pausing: bool, backup: str | None = None
    ) -> None:
        super().__init__(machine, name)
        self.pausing, self.backup = pausing, backup

    def build(self) -> None:
        if self.pausing:
            super().build()

    def prepare(self) -> None:
        pass

    def act(self) -> None:
        if self.pausing:
            self.memsaver.pause(*self.bystander.names, backup=self.backup)
        else:
            self.memsaver.device_memory(0)

    def check_unchanged(self, error: Exception) -> None:
        if self.pausing:
            self.check_bystander()

    def check_done(self) -> None:
        if self.pausing:
            require(self.bystander.states() == {"paused"}, "not paused")
            return
        super().build()

    def rest(self) -> None:
        self.memsaver.resume(*self.bystander.names)
        self.check_bystander()
        super().rest()
