"""Pauses, resumes and swaps under faults.

The scenarios include every kind of backup, transitions of only some tags, graphs, and background
transitions.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from typing import ClassVar

from faults.machine import Group, Machine
from faults.scenario import SMALL_GRANULE, Scenario, require


class Transitions(Scenario):
    """The common parts of pauses and resumes."""

    granule = SMALL_GRANULE

    def check_mapped(self, group: Group, held: int, intact: bool = True) -> None:
        require(group.states() == {"mapped"}, f"{group.names} are {group.states()}, not mapped")
        require(group.held() == held, f"{group.names} hold {group.held()} bytes, not {held}")
        if intact:
            require(group.is_intact(), f"contents of {group.names} are lost")

    def check_paused(self, group: Group) -> None:
        require(group.states() == {"paused"}, f"{group.names} are {group.states()}, not paused")
        require(group.held() == 0, f"{group.names} are paused and hold {group.held()} bytes")
        require(group.is_gone(), f"{group.names} are paused, and their memory is there")

    def was_kept(self, group: Group, error: Exception) -> bool:
        """Return whether the rollback also failed because a call failed or a backup was unreadable.

        A rollback requires no host memory (csrc/DESIGN.md).
        """
        refused = "resume them" in str(error) and "no host memory left" not in str(error)
        return group.states() == {"paused"} and refused


class Pause(Transitions):
    """A pause of two of three tags. The backup is new, or exists and is partly outdated."""

    def __init__(
        self,
        machine: Machine,
        name: str,
        backup: str,
        kept: bool = False,
        devices: int = 1,
        background: bool = False,
        shareable: bool = False,
    ) -> None:
        super().__init__(machine, name)
        self.devices, self.kept, self.background = devices, kept, background
        self.going = self.group("going", backup, tags=2, shareable=shareable)

    def build(self) -> None:
        super().build()
        for device in range(self.devices):
            self.going.allocate(self.sizes, device)
            self.going.allocate(self.sizes[:2], device, tag=1)
        self.memsaver.pause(*self.going.names)
        self.memsaver.resume(*self.going.names)
        self.held = self.going.held()

    def prepare(self) -> None:
        self.going.fill()
        if self.kept:
            self.memsaver.pause(*self.going.names)
            self.memsaver.resume(*self.going.names)
            self.going.fill()
            self.going.change()

    def act(self) -> None:
        if self.background:
            self.memsaver.pause(*self.going.names, wait=False).wait()
        else:
            self.memsaver.pause(*self.going.names)

    def check_unchanged(self, error: Exception) -> None:
        self.check_bystander()
        if not self.was_kept(self.going, error):
            self.check_mapped(self.going, self.held)
            return
        self.memsaver.resume(*self.going.names)
        self.check_mapped(self.going, self.held)

    def check_done(self) -> None:
        self.check_paused(self.going)
        self.check_bystander()

    def rest(self) -> None:
        self.memsaver.resume(*self.going.names)
        require(self.going.came_back(), f"{self.going.names} came back with different contents")
        super().rest()


class Resume(Pause):
    """A resume of two of three tags. The third tag stays paused with its backup."""

    def build(self) -> None:
        super().build()
        self.staying = self.group("staying", "host")
        self.staying.allocate(self.sizes[:1])
        self.staying.fill()

    def prepare(self) -> None:
        self.going.fill()
        self.memsaver.pause(*self.going.names, *self.staying.names)

    def act(self) -> None:
        if self.background:
            transition = self.memsaver.resume(*self.going.names, wait=False)
            with contextlib.suppress(self.memsaver.MemsaverError):
                # If one of these fails, the resume may fail or not.
                transition.wait_stream(0, memory=self.going.blocks[0][0])
                transition.wait_memory(self.going.blocks[-1][0])
                transition.wait_stream(0)
            transition.wait()
        else:
            self.memsaver.resume(*self.going.names)

    def check_unchanged(self, error: Exception) -> None:
        self.check_paused(self.going)
        self.check_paused(self.staying)
        self.check_bystander()

    def check_done(self) -> None:
        self.check_mapped(self.going, self.going.held(), intact=False)
        require(self.going.came_back(), f"{self.going.names} came back with different contents")
        self.check_paused(self.staying)
        self.check_bystander()

    def rest(self) -> None:
        self.memsaver.resume(*self.staying.names)
        require(self.staying.is_intact(), "contents of a tag that was not asked for are lost")
        super().rest()


class Unrestored(Resume):
    """A resume of tags whose contents are about to be overwritten."""

    def act(self) -> None:
        self.memsaver.resume(*self.going.names, restore=False)

    def check_done(self) -> None:
        self.check_mapped(self.going, self.going.held(), intact=False)
        require(self.going.is_zero(), f"{self.going.names} have contents")
        self.going.fill()
        self.check_paused(self.staying)
        self.check_bystander()


class Swap(Transitions):
    """A swap of two tags out and one tag in. Only some pages have the right size for a transfer."""

    options: ClassVar[dict[str, str]] = {"share_bytes": "4MiB", "slab_bytes": "2MiB"}

    def __init__(
        self,
        machine: Machine,
        name: str,
        out: str,
        into: str,
        background: bool = False,
        shareable: bool = False,
    ) -> None:
        super().__init__(machine, name)
        self.background = background
        self.devices = 2 if "peer" in (out, into) else 1  # the backups are on the second
        self.out = self.group("out", out, tags=2, shareable=shareable)
        self.into = self.group("into", into, shareable=shareable)

    def build(self) -> None:
        super().build()
        self.out.allocate([4096, self.granule + 512, 100_000])
        self.out.allocate([self.granule], tag=1)
        self.into.allocate([self.granule, 512, self.granule + 512])

    def prepare(self) -> None:
        self.out.fill()
        self.into.fill()
        self.memsaver.pause(*self.into.names)
        self.held = self.out.held()

    def act(self) -> None:
        if self.background:
            self.memsaver.swap(out=self.out.names, into=self.into.names, wait=False).wait()
        else:
            self.memsaver.swap(out=self.out.names, into=self.into.names)

    def check_unchanged(self, error: Exception) -> None:
        self.check_bystander()
        # Contents that a swap overwrites may be lost if they have no backup.
        kept = self.out.backup != "none"
        if not self.was_kept(self.out, error):
            self.check_paused(self.into)
            self.check_mapped(self.out, self.held, intact=kept)
            return
        require(self.into.states() == {"paused"}, f"{self.into.names} are not paused")
        self.memsaver.resume(*self.out.names)
        require(self.out.is_intact() or not kept, f"contents of {self.out.names} are lost")

    def check_done(self) -> None:
        self.check_paused(self.out)
        require(self.into.states() == {"mapped"}, "what was to come in is not mapped")
        require(self.into.came_back(), f"{self.into.names} came back with different contents")
        self.check_bystander()

    def rest(self) -> None:
        self.memsaver.resume(*self.out.names, *self.into.names)
        require(self.out.came_back(), f"{self.out.names} came back with different contents")
        # In the original state, because a transferred page may be larger.
        self.memsaver.pause(*self.out.names, *self.into.names, backup="none")
        self.memsaver.resume(*self.out.names, *self.into.names)
        super().rest()


class Graph(Pause):
    """A pause or resume of memory that a captured graph uses. The graph is replayed afterwards."""

    def __init__(self, machine: Machine, name: str, act: str) -> None:
        super().__init__(machine, name, "host")
        self.resuming = act == "resume"

    def build(self) -> None:
        super().build()
        library = self.sim.opened
        self.stack = contextlib.ExitStack()
        self.stream = self.stack.enter_context(self.sim.stream())
        graph, self.executable = ctypes.c_void_p(), ctypes.c_void_p()
        require(library.cuStreamBeginCapture_v2(self.stream, 0) == 0, "no capture")
        self.memory, contents = self.going.blocks[0]
        self.written = bytes([9]) * len(contents)
        self.sim.memset(self.memory.address, 9, len(contents), self.stream)
        library.cuStreamEndCapture(self.stream, ctypes.byref(graph))
        library.cuGraphInstantiateWithFlags(
            ctypes.byref(self.executable), graph, ctypes.c_ulonglong(0)
        )
        library.cuGraphDestroy(graph)
        library.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def replay(self) -> None:
        """Replay the graph without changing the contents."""
        library = self.sim.opened
        self.sim.write(self.memory.address, bytes(len(self.written)))
        require(library.cuGraphLaunch(self.executable, self.stream) == 0, "no replay")
        require(library.cuStreamSynchronize(self.stream) == 0, "the replay failed")
        replayed = self.sim.read(self.memory.address, len(self.written))
        require(replayed == self.written, "the graph did not reach its memory")
        self.sim.write(self.memory.address, self.going.blocks[0][1])

    def prepare(self) -> None:
        super().prepare()
        # The call waits for work in flight on the program's stream, even if it fails.
        self.sim.opened.cuGraphLaunch(self.executable, self.stream)
        if self.resuming:
            self.memsaver.pause(*self.going.names)

    def act(self) -> None:
        (self.memsaver.resume if self.resuming else self.memsaver.pause)(*self.going.names)

    def expect_replayed(self) -> None:
        """Check the graph's output from before the pause, then replay it and restore the
        contents.
        """
        replayed = self.sim.read(self.memory.address, len(self.written))
        require(replayed == self.written, "what the graph had written is lost")
        self.replay()

    def check_unchanged(self, error: Exception) -> None:
        self.check_bystander()
        if self.resuming:
            self.check_paused(self.going)
            return
        if self.was_kept(self.going, error):
            self.memsaver.resume(*self.going.names)
        self.sim.opened.cuStreamSynchronize(self.stream)
        self.expect_replayed()
        self.check_mapped(self.going, self.held)
        self.sim.opened.cuGraphLaunch(self.executable, self.stream)

    def check_done(self) -> None:
        self.check_bystander()
        if not self.resuming:
            self.check_paused(self.going)

    def rest(self) -> None:
        self.memsaver.resume(*self.going.names)
        self.expect_replayed()
        super().rest()


class NeighbourNearlyFull(Pause):
    """A pause with a backup on another GPU, which has room for only part of the contents."""

    options: ClassVar[dict[str, str]] = {"peer_margin_bytes": "0"}
    neighbour = 1

    def build(self) -> None:
        super().build()
        self.prepare()
        self.act()  # without faults
        require(all(self.places()), f"the neighbour and the host have {self.places()} bytes")
        self.rest()

    def prepare(self) -> None:
        super().prepare()
        self.memsaver.trim(wait=True)
        free, _ = self.memsaver.device_memory(self.neighbour)
        self.sim.occupy(free - 2 * self.granule, self.neighbour)

    def places(self) -> tuple[int, int]:
        """Return the number of backup bytes on the neighbour and on the host."""
        rows = self.memsaver.stats().tags
        saved = [row for row in rows if row.tag in self.going.names and row.device == 0]
        return sum(row.peer_bytes for row in saved), sum(row.host_bytes for row in saved)

    def check_done(self) -> None:
        super().check_done()
        require(self.places()[1] > 0, "nothing is on the host")

    def rest(self) -> None:
        super().rest()
        self.sim.occupy(0, self.neighbour)


class DiskNamed(Pause):
    """A pause to a disk whose file system does not support unnamed files."""

    standing: ClassVar[dict[str, int]] = {"open_unnamed": errno.EOPNOTSUPP}


class DiskCached(Pause):
    """A pause to a disk whose file system supports neither direct transfers nor preallocation."""

    standing: ClassVar[dict[str, int]] = {"fcntl": errno.EINVAL, "fallocate": errno.EOPNOTSUPP}
