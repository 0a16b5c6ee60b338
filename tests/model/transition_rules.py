"""Rules that pause, resume and swap tags, either with a wait or during other operations."""

from __future__ import annotations

from functools import partial
from typing import Any

from faults.injections import Injection
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import memsaver
from memsaver.errors import OutOfDeviceMemoryError, OutOfHostMemoryError
from model.arguments import (
    OVERRIDE,
    SIDES,
    SOME,
    THREAD,
    devices,
    lists,
    names,
    overrides,
    picks,
    sides,
    some,
    threads,
)
from model.calls import Outcome
from model.chances import FIRST, SAVING, SECOND, UNDOING, injections, mostly, of_transition
from model.checks import check_contents, require
from model.expected import Tag, pages_under
from model.place import DEVICES
from model.sharing import Sharing

KINDS = ("pause", "resume", "swap")
WAITS = ("the end", "a stream", "some memory", "some memory on a stream")
_COPIES_PER_SECOND = 200  # of a whole tag
TURNS = ("turn", "turn", "turn", "turn", "swap", "swap", "pause", "resume")


# The byte that device work writes during a transition: two values, so that contents recur.
AT_WORK = [None, None, None, None, 1, 1, 2, 2]
# Rules are equally likely, so the most important ones are listed several times.
changes = rule(drawn=lists(5, 10, (TURNS, SOME, SIDES, OVERRIDE, THREAD, AT_WORK), FIRST, SECOND))


class TransitionRules(Sharing):
    @changes
    def change(self, drawn):
        """Run several transitions one after the other, most of them under faults."""
        for i, ((kind, some_of, over, backup, thread, value), *chances) in enumerate(drawn):
            if i > 0:
                self.release_imports()  # only the first transition may be refused because of them
                self.compare()
            elif self.imports and kind == "turn":
                kind, some_of = "pause", (self.imports[0].allocation.tag.name,)
            chosen = over if kind == "swap" else some_of
            if kind == "turn":
                kind, chosen = self.turn(chosen)
            _, going, coming = self.parts(kind, chosen, backup)
            there = [each for tag in going if not tag.paused for each in tag.allocations]
            if there and value is not None:
                self.work_on(there[self.steps % 2 % len(there)], value)
            out = {backup or tag.policy for tag in going if not tag.paused}
            into = {tag.saved for tag in coming if tag.paused}
            faults: tuple[Injection, ...] = ()
            if out or into:
                calls = of_transition(kind, sorted(out), sorted(into))
                faults = injections(chances, calls, UNDOING[kind])
            self.begin(kind, chosen, backup, faults, thread)
            self.transition(kind, chosen, backup, thread, faults)

    @changes
    def change_more(self, drawn):
        self.change(drawn)

    @changes
    def change_again(self, drawn):
        self.change(drawn)

    @changes
    def change_on(self, drawn):
        self.change(drawn)

    @precondition(lambda self: not self.flying and self.allocations())
    @rule(name=names, backup=st.sampled_from(["host", "pageable", "disk", "peer"]), chances=mostly)
    def relapse(self, name, backup, chances):
        """Rewrite the contents of an earlier backup, after a pause that might have failed."""
        (tag,) = self.named((name,))
        if self.refusals([tag]) or not tag.allocations:
            return
        failing = injections(chances, SAVING)
        for value, faults in ((1, ()), (2, failing), (1, ())):
            self.begin("relapse", name, backup, value, faults)
            self.transition("resume", (name,), None, 0)
            if tag.paused:
                return
            self.compare()
            self.work_on(tag.allocations[0], value)
            self.transition("pause", (name,), backup, 0, faults)
            self.compare()

    def turn(self, names):
        """Choose a transition that is possible for some of these tags; return its kind and its
        tags.
        """
        tags = self.named(names)
        paused = tuple(tag.name for tag in tags if tag.paused)
        free = tuple(tag.name for tag in tags if not tag.paused and not tag.regions)
        if paused and (not free or self.steps % 2):
            return "resume", paused
        return "pause", free or names

    def parts(self, kind, names, backup, **named):
        """Return the call, the tags to pause and the tags to resume."""
        if kind == "pause":
            return partial(memsaver.pause, *names, backup=backup, **named), self.named(names), []
        if kind == "resume":
            named["restore"] = self.restores(names, backup)
            return partial(memsaver.resume, *names, **named), [], self.named(names)
        out, into = names
        call = partial(memsaver.swap, out=out, into=into, backup=backup, **named)
        return call, self.named(out), self.named(into)

    def restores(self, names, backup):
        """Return whether a resume restores contents if `backup` was drawn; for "none", it does not.

        A resume of retained pages always restores contents because the pages keep their contents.
        """
        return backup != "none" or any(tag.retained for tag in self.named(names))

    def lose(self, kind, names, backup, tags):
        """Discard the contents of these tags if a resume will not restore them."""
        if kind == "resume" and not self.restores(names, backup):
            for tag in tags:
                tag.saved = "none"

    def transition(self, kind, names, backup, thread, faults=()):
        """Run a transition and wait for it; check that it succeeded completely or changed
        nothing.
        """
        call, going, coming = self.parts(kind, names, backup)
        swap = kind == "swap"
        if self.refuse(going, call, thread=thread):
            return
        if self.scarce:
            self.land()
        enough = None if swap else self.is_enough_for(coming)
        may: tuple[Any, ...] = (OutOfHostMemoryError,) if self.scarce_host else ()
        if self.scarce_device and not enough:
            may += (OutOfDeviceMemoryError,)
        done = self.call(call, thread=thread, faults=faults, may=may)
        self.touched |= {*going, *coming}
        if done.error is not None:
            self.failed(done, kind, going, coming, backup)
            return
        require(enough is not False or bool(done.met), "a resume found memory that is not there")
        self.check_report(done.result, going, coming, backup)
        changed = [tag for tag in coming if tag.paused]
        if not done.met:
            self.deferring -= {each.device for tag in changed for each in tag.allocations}
            for tag in changed + [tag for tag in going if not tag.paused]:
                tag.owing = False
        for tag in going:
            if not tag.paused:
                sure = self.fingerprints and not self.scarce_host and not done.met
                saved = backup or tag.policy
                tag.known = saved if sure and saved != "none" else None
            tag.pause(backup)
        self.lose(kind, names, backup, changed)
        self.come_back(changed)

    @property
    def scarce_device(self) -> bool:
        return any(self.place.scarce(device) for device in range(DEVICES))

    @property
    def scarce(self) -> bool:
        return self.scarce_device or self.scarce_host

    def is_enough_for(self, tags: list[Tag]) -> bool | None:
        """Return whether the pages of a resume fit on the devices; only live allocations need
        pages.

        Returns None if the answer is unknown because pages are retained or releases are deferred.
        """
        if any(tag.retained for tag in tags) or self.deferring:
            return None
        for device in range(DEVICES):
            need = sum(pages_under(tag.ranges(device)) for tag in tags if tag.paused)
            if self.place.scarce(device) and memsaver.device_memory(device)[0] < need:
                return False
        return True

    def failed(self, done: Outcome, kind: str, going: list[Tag], coming: list[Tag], backup) -> None:
        """Check that nothing has changed, unless the rollback also failed."""
        for tag in (*going, *coming):
            tag.known = None
        for tag in going:
            if tag.paused:
                continue
            # A swap may have overwritten contents that were to be discarded.
            tag.unknown = tag.unknown or (kind == "swap" and (backup or tag.policy) == "none")
            if memsaver.state(tag.name) == "paused":
                where = f"{tag.name} is paused after {done.error!r}, under {done.met}"
                require(done.may_park(kind), where)
                require("resume them" in str(done.error), f"{where}, which does not say so")
                tag.park()
        self.rewrite_unknown(going)

    def check_report(self, report: memsaver.Report, going, coming, backup) -> None:
        """Check the changed tags in the report and the upper limit of its copied bytes."""
        changed = {row.tag for row in report.changes if row.changed}
        expected = {tag.name for tag in going if not tag.paused}
        expected |= {tag.name for tag in coming if tag.paused}
        require(changed == expected, f"{changed} are said to have changed, not {expected}")
        for row in report.changes:
            (tag,) = self.named((row.tag,))
            if not self.flying:
                at_most = tag.nbytes(row.device) if row.changed else 0
                require(row.copied_bytes <= at_most, f"more is copied than there is: {row}")
                if tag in going and self.fingerprints and tag.known == (backup or tag.policy):
                    require(row.copied_bytes == 0, f"nothing has changed, and is copied: {row}")
                    self.process.unchanged += row.changed

    @precondition(lambda self: not self.scarce and len(self.flying) < 3)
    @rule(do=st.sampled_from(KINDS), names=some, sides=sides, backup=overrides, thread=threads)
    def fly(self, do, names, sides, backup, thread):
        """Start a transition without waiting for it, so that other operations run concurrently."""
        self.begin("fly", do, names, sides, backup, thread)
        names = sides if do == "swap" else names
        call, going, coming = self.parts(do, names, backup, wait=False)
        if self.refuse(going, call, thread=thread):
            return
        if any(tag.unknown for tag in coming):
            return
        handle = self.call(call, thread=thread).result
        for tag in going:
            if not tag.paused:
                tag.known = None
            tag.pause(backup)
        self.lose(do, names, backup, coming)
        for tag in coming:
            if tag.paused:
                tag.resume(self.fill)
        self.flying.append((do, handle, [*going, *coming]))

    @precondition(lambda self: self.flying)
    @rule(pick=picks, how=st.sampled_from(WAITS), device=devices)
    def wait(self, pick, how, device):
        """Wait for a transition in progress, on the host or a stream, for all or part of the
        memory.
        """
        self.begin("wait", pick, how, device)
        at = pick % len(self.flying)
        kind, handle, tags = self.flying[at]
        later = {tag for *_, others in self.flying[at + 1 :] for tag in others}
        there = [
            each for tag in tags if not tag.paused and tag not in later for each in tag.on(device)
        ]
        some = there[pick % 3 :][:2]
        ranges = [(each.address, each.nbytes) for each in some]
        if how == "some memory":
            self.call(handle.wait_memory, ranges)
            for each in some:
                check_contents(self.place, each, wholly=True)
        elif how != "the end":
            stream = self.place.streams[device]
            memory = ranges if how == "some memory on a stream" else None
            self.call(handle.wait_stream, stream.value, memory=memory)
            for each in some if kind == "resume" else ():
                self.sim.memset(each.address, 7, each.nbytes, stream)
                each.set(7)
                each.tag.known = None
        self.land(tags)

    @precondition(lambda self: not self.scarce and not self.flying)
    @rule(name=names, pick=picks, on_host=st.booleans())
    def use_before_all_has_arrived(self, name, pick, on_host):
        """During a resume whose copies take a few milliseconds, wait for a block and use it."""
        (tag,) = self.named((name,))
        if not tag.paused or tag.unknown or not tag.allocations:
            return
        self.begin("use_before_all_has_arrived", name, pick, on_host)
        self.let_go()
        self.sim.copy_rate(_COPIES_PER_SECOND * tag.nbytes())
        handle = self.call(memsaver.resume, name, wait=False).result
        tag.resume(self.fill)
        block = tag.allocations[pick % len(tag.allocations)]
        memory = block.address, block.nbytes
        if on_host:
            self.call(handle.wait_memory, memory)
            check_contents(self.place, block, wholly=True)
        else:
            stream = self.place.streams[block.device]
            self.call(handle.wait_stream, stream.value, memory=memory)
            self.sim.memset(block.address, 7, block.nbytes, stream)
            block.set(7)
            tag.known = None
        handle.wait()
        self.sim.copy_rate(0)
        self.touched.add(tag)

    @rule(names=some, backup=overrides, thread=threads)
    def paused_for_a_block(self, names, backup, thread):
        self.begin("paused_for_a_block", names, backup, thread)
        tags = self.named(names)
        if self.scarce:
            return
        if self.refuse(tags, memsaver.paused(*names, backup=backup).__enter__, thread=thread):
            return
        self.land(tags)
        self.synchronize()
        going = [tag for tag in tags if not tag.paused]
        for tag in going:
            tag.known = None
        with memsaver.paused(*names, backup=backup):
            for tag in going:
                require(memsaver.state(tag.name) == "paused", f"{tag.name} is not paused")
                tag.pause(backup)
        self.come_back(going)
        self.touched |= set(tags)
