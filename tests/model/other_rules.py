"""Rules for backup views, fingerprints, options, shortages, invalid calls and forks."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import traceback

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import (
    ConfigError,
    InvalidStateError,
    MemsaverError,
    OutOfHostMemoryError,
    UnknownTagError,
)
from model.apparatus import Apparatus
from model.arguments import devices, names, picks, seeds, threads
from model.chances import FINGERPRINT, TRIM, injections, mostly
from model.checks import require
from model.place import MIB

SCARCE = [None, None, None, None, 0, 1 * MIB, 2 * MIB, 5 * MIB, 9 * MIB, 20 * MIB]
OPTIONS = [
    *(("share_bytes", "2MiB"), ("share_bytes", 512 * MIB), ("slab_bytes", "2MiB")),
    *(("slab_bytes", 64 * MIB), ("fingerprints", False), ("fingerprints", True)),
    *(("poison", True), ("poison", False), ("margin_bytes", 0), ("margin_bytes", "100GiB")),
    *(
        ("host_bytes", 0),
        ("host_bytes", 0),
        ("host_bytes", "6MiB"),
        ("host_bytes", "1MiB"),
        ("disk_dir", ""),
    ),
]
WRONG_OPTIONS = [
    *(("share_bytes", "1"), ("slab_bytes", "much"), ("fingerprints", "perhaps"), ("no", 1)),
    *(("disk_dir", "/nowhere"), ("host_bytes", -1)),
]
CHILD_SECONDS = 3


class OtherRules(Apparatus):
    digests: dict[bytes, str]  # by contents, for all sequences

    @precondition(lambda self: self.allocations(mapped=False))
    @rule(pick=picks, seed=seeds, writable=st.booleans())
    def view(self, pick, seed, writable):
        """Read or change the saved contents of a paused block."""
        self.begin("view", pick, seed, writable)
        there = self.allocations(mapped=False)
        allocation = there[pick % len(there)]
        tag = allocation.tag
        if tag.retained:
            return
        self.land([tag])
        arguments = allocation.address, allocation.nbytes, writable
        if tag.saved not in ("host", "pageable"):
            self.refused(InvalidStateError, _C.backup_view, *arguments)
            return
        saved = self.call(_C.backup_view, *arguments).result
        require(bytes(saved) == allocation.contents, "a backup is not what was saved")
        if writable:
            at = seed % allocation.nbytes
            saved[at] = allocation.contents[at] = seed % 256
            tag.known = None
        saved.release()
        self.touched.add(tag)

    @precondition(lambda self: self.is_rested("fingerprint"))
    @rule(name=names, thread=threads, chances=mostly)
    def fingerprint(self, name, thread, chances):
        """Check that fingerprints are equal for equal contents and differ for different
        contents.
        """
        faults = injections(chances, FINGERPRINT)
        self.begin("fingerprint", name, thread, faults)
        (tag,) = self.named((name,))
        self.land([tag])
        self.synchronize()
        if tag.paused:
            self.refused(InvalidStateError, memsaver.fingerprint, name, thread=thread)
            return
        may = (OutOfHostMemoryError,) if self.scarce_host else ()
        found = self.call(memsaver.fingerprint, name, thread=thread, faults=faults, may=may)
        if found.error is None:
            contents = hashlib.blake2b()
            for each in sorted(tag.allocations, key=lambda each: each.address):
                contents.update(each.nbytes.to_bytes(8, "little"))
                contents.update(each.contents)
            known = self.digests.setdefault(contents.digest(), found.result)
            require(known == found.result, f"the fingerprint of {name} was {known} before")
            require(
                list(self.digests.values()).count(known) == 1 or len(self.digests) > 500,
                "other contents have the same fingerprint",
            )

    @precondition(lambda self: self.is_rested("trim"))
    @rule(wait=st.booleans(), thread=threads, chances=mostly)
    def trim(self, wait, thread, chances):
        faults = injections(chances, TRIM)
        self.begin("trim", wait, thread, faults)
        self.forget()
        if wait or faults:
            self.call(memsaver.trim, wait=True, thread=thread, faults=faults)
        else:
            self.call(lambda: memsaver.trim().wait(), thread=thread)

    @precondition(lambda self: self.is_rested("configure"))
    @rule(option=st.sampled_from(OPTIONS), disk=st.integers(0, 1))
    def configure(self, option, disk):
        name, value = option
        self.begin("configure", name, value, disk)
        self.land()
        if name == "disk_dir":
            value = self.process.folders[disk]
        self.call(memsaver.configure, **{name: value})
        if name == "poison":
            self.poison = value
        elif name == "fingerprints":
            self.fingerprints = value
        elif name == "disk_dir":
            self.forget()
        elif name == "host_bytes":
            self.scarce_host = value != 0
            self.forget()
        elif name == "margin_bytes":
            self.margin = 100 << 30 if value else 0

    def forget(self) -> None:
        """Release retained backups."""
        for tag in self.tags:
            tag.known = None

    @precondition(lambda self: self.is_rested("occupy"))
    @rule(device=devices, left=st.sampled_from(SCARCE))
    def occupy(self, device, left):
        """Make another process allocate or release a device's memory."""
        self.begin("occupy", device, left)
        self.land()
        self.let_go()
        if not self.deferring:
            self.place.leave(device, left)

    @precondition(lambda self: self.is_rested("do_wrong"))
    @rule(which=st.integers(0, 7), name=names, wrong=st.sampled_from(WRONG_OPTIONS))
    def do_wrong(self, which, name, wrong):
        """Make an invalid call, which must not change anything."""
        self.begin("do_wrong", which, name, wrong)
        allocations = self.allocations()
        if which == 0:
            self.refused(UnknownTagError, memsaver.pause, name, "nobody")
        elif which == 1:
            self.refused(ConfigError, memsaver.swap, out=name, into=[name, "a"])
        elif which == 2:
            self.refused(ConfigError, memsaver.swap, out=name, into=())
        elif which == 3:
            self.refused(ConfigError, memsaver.pause, name, backup="tape")
        elif which == 4:
            self.refused(ConfigError, memsaver.configure, **dict([wrong]))
        elif which == 5 and not self.stacks[0]:
            self.refused(InvalidStateError, _C.malloc, 4096, 0)
        elif which == 6 and allocations:
            self.refused(ConfigError, _C.free, allocations[0].address + 256)
        elif which == 7:
            self.refused(UnknownTagError, memsaver.resume, "nobody")

    @precondition(lambda self: not self.forked)
    @rule(pick=picks)
    def fork(self, pick):
        """Fork a child in which the library must be inactive; the parent's state must not
        change.
        """
        self.begin("fork", pick)
        self.forked = True  # once in a sequence: a fork takes as long as a hundred operations
        self.synchronize()
        allocations = self.allocations()
        address = allocations[pick % len(allocations)].address if allocations else 0
        child = os.fork()
        if child == 0:
            status = 1
            try:
                faulthandler.register(signal.SIGALRM, chain=True)
                signal.alarm(CHILD_SECONDS)
                self._be_inert(address)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        require(status == 0, f"a forked child ended with status {status}")

    def _be_inert(self, address: int) -> None:
        if address:
            _C.free(address)
            _C.free(address)
        for call, *arguments in (
            *((memsaver.pause,), (memsaver.resume, "a"), (memsaver.stats,), (memsaver.state, "a")),
            *((memsaver.ranges, "a"), (_C.malloc, 4096, 0), (_C.trim,)),
            (memsaver.region("a").__enter__,),
        ):
            try:
                call(*arguments)
            except InvalidStateError:
                continue
            except MemsaverError as error:
                raise AssertionError(f"{call} in a forked child: {error!r}") from error
            raise AssertionError(f"{call} did something in a forked child")
