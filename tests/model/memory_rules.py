"""Rules that allocate, write and free memory."""

from __future__ import annotations

from functools import partial

from faults.injections import Injection
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import InvalidStateError, OutOfDeviceMemoryError
from model.arguments import backups, devices, names, picks, seeds, sizes, threads
from model.calls import Outcome
from model.chances import ALLOCATE, FREE, injections, mostly
from model.checks import require
from model.expected import PAGE, Allocation, Tag, block_bytes
from model.place import DEVICES, MIB, NAMES
from model.sharing import Sharing

LIVE_BYTES = 16 * MIB  # the limit before an allocation


class MemoryRules(Sharing):
    @initialize(
        policies=st.tuples(*(backups for _ in NAMES)),
        drawn=st.lists(sizes, min_size=len(NAMES), max_size=9),
        seed=seeds,
    )
    def populate(self, policies, drawn, seed):
        """Allocate the initial blocks; each size uses the next tag and the next device."""
        for tag, backup in zip(self.tags, policies, strict=True):
            with memsaver.region(tag.name, backup=backup):
                tag.policy = backup or tag.policy
        for i, nbytes in enumerate(drawn):
            self.begin("populate", nbytes)
            tag, device = self.tags[(seed + i) % len(NAMES)], (seed + i) % 3 % DEVICES
            made = self.call(self.in_region, tag.name, None, nbytes, device)
            self.allocated(made, tag, device, nbytes, seed + i)

    @precondition(lambda self: self.live_bytes() < LIVE_BYTES)
    @rule(
        name=names,
        backup=backups,
        device=devices,
        nbytes=sizes,
        seed=seeds,
        thread=threads,
        chances=mostly,
    )
    def allocate(self, name, backup, device, nbytes, seed, thread, chances):
        """Allocate in a new region or in the thread's open region."""
        faults = injections(chances, ALLOCATE)
        self.begin("allocate", name, backup, device, nbytes, thread, faults)
        (tag,) = self.named((name,))
        if self.stacks[thread]:
            self.allocate_here(device, nbytes, seed, thread, faults)
            return
        if tag.paused:
            self.refused(InvalidStateError, self.in_region, name, backup, nbytes, device)
            return
        made = self.call(
            self.in_region,
            *(name, backup, nbytes, device),
            thread=thread,
            faults=faults,
            may=self.shortage(device, nbytes),
        )
        if backup is not None:
            tag.policy = backup
            if any(fault.call == "malloc" for fault in made.met):
                with memsaver.region(name, backup=backup):
                    pass  # sets the policy; the failed call may not have entered its region
        self.allocated(made, tag, device, nbytes, seed)

    def in_region(self, name, backup, nbytes, device):
        with memsaver.region(name, backup=backup):
            return _C.malloc(nbytes, device)

    def allocate_here(self, device, nbytes, seed, thread, faults):
        tag = self.stacks[thread][-1][1]
        if tag is None:
            self.refused(InvalidStateError, _C.malloc, nbytes, device, thread=thread)
            return
        may = self.shortage(device, nbytes)
        made = self.call(_C.malloc, nbytes, device, thread=thread, faults=faults, may=may)
        self.allocated(made, tag, device, nbytes, seed)

    def shortage(self, device: int, nbytes: int) -> tuple[type[OutOfDeviceMemoryError], ...]:
        """Return the errors that an allocation can raise; without a shortage, there are no such
        errors.
        """
        free = memsaver.device_memory(device)[0] - self.margin
        enough = free >= block_bytes(nbytes) + PAGE and not self.flying
        return () if enough else (OutOfDeviceMemoryError,)

    def allocated(self, made: Outcome, tag: Tag, device: int, nbytes: int, seed: int) -> None:
        self.touched.add(tag)
        if made.error is not None:
            return
        tag.known = None
        if not made.met:
            self.deferring.discard(device)
            tag.owing = False
        address = made.result
        require(address % (PAGE if block_bytes(nbytes) >= PAGE else 512) == 0, "it is not aligned")
        allocation = Allocation(tag, device, address, bytearray(block_bytes(nbytes)))
        tag.allocations.append(allocation)
        self.place.fill(address, allocation.contents, 0, allocation.nbytes, seed)

    @precondition(lambda self: self.allocations(mapped=True))
    @rule(pick=picks, start=st.integers(0, 99), length=st.sampled_from([1, 4096, MIB]), seed=seeds)
    def write(self, pick, start, length, seed):
        self.begin("write", pick, start, length, seed)
        allocation = self.pick(pick, mapped=True)
        self.land([allocation.tag])
        self.let_go()
        start = allocation.nbytes * start // 100
        length = min(length, allocation.nbytes - start)
        self.place.fill(allocation.address, allocation.contents, start, length, seed)
        allocation.tag.known = None
        self.touched.add(allocation.tag)

    @precondition(lambda self: self.allocations(mapped=True))
    @rule(pick=picks, value=st.integers(0, 255))
    def write_on_the_device(self, pick, value):
        """Submit a write that still runs in the next operation. That operation must wait before it
        unmaps memory.
        """
        self.work_on(self.pick(pick, mapped=True), value)

    def pick(self, pick: int, mapped: bool | None = None) -> Allocation:
        there = self.allocations(mapped=mapped)
        return there[pick % len(there)]

    @precondition(lambda self: self.allocations())
    @rule(pick=picks, thread=threads, chances=mostly)
    def free(self, pick, thread, chances):
        """Free a block in any state of its tag, even during a transition.

        The operation never fails.

        A block that was sent stays allocated for its importers.
        """
        faults = injections(chances, FREE)
        self.begin("free", pick, thread, faults)
        self.free_one(self.pick(pick), thread, faults)

    def free_one(self, allocation: Allocation, thread: int, faults: tuple[Injection, ...]) -> None:
        owner = allocation.owner
        if allocation.is_deleted:
            return
        free = partial(_C.free, allocation.address) if owner is None else owner.delete
        freed = self.call(free, thread=thread, faults=faults)
        require(freed.error is None, f"a free failed: {freed.error!r}")
        is_kept = bool(allocation.in_transit or allocation.users)
        if owner is not None:
            require(owner.freed.is_set() != is_kept, f"{allocation} is freed, or is not")
        if not is_kept:
            self.freed(allocation, owing=bool(freed.met))
