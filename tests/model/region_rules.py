"""Rules that enter and leave regions on several threads, including in invalid ways."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import InvalidStateError
from model.apparatus import Apparatus
from model.arguments import backups, names, threads
from model.checks import require

MOST = 3  # regions open at the same time


class RegionRules(Apparatus):
    @precondition(lambda self: sum(map(len, self.stacks)) < MOST and self.is_rested("enter"))
    @rule(name=st.one_of(names, st.none()), backup=backups, thread=threads)
    def enter(self, name, backup, thread):
        """Enter a region or a disabled section."""
        self.begin("enter", name, backup, thread)
        if name is None:
            disabled = memsaver.disabled()
            self.call(disabled.__enter__, thread=thread)
            self.stacks[thread].append((disabled, None))
            return
        (tag,) = self.named((name,))
        entered = memsaver.region(name, backup=backup)
        if tag.paused:
            self.refused(InvalidStateError, entered.__enter__, thread=thread)
            return
        self.call(entered.__enter__, thread=thread)
        tag.regions += 1
        if backup is not None:
            tag.policy = backup
        self.stacks[thread].append((entered, tag))

    @precondition(lambda self: any(self.stacks))
    @rule(thread=threads)
    def leave(self, thread):
        self.begin("leave", thread)
        if self.stacks[thread]:
            self.leave_innermost(thread)

    @precondition(lambda self: any(self.stacks) and self.is_rested("leave_wrongly"))
    @rule(thread=threads, other=threads)
    def leave_wrongly(self, thread, other):
        """Try to leave a region that is not the innermost one or that another thread entered."""
        self.begin("leave_wrongly", thread, other)
        there = self.stacks[thread]
        for entered, _ in there if thread != other else there[:-1]:
            self.refused(InvalidStateError, entered.__exit__, None, None, None, thread=other)
        for asked, stack in enumerate(self.stacks):
            tag = stack[-1][1].name if stack and stack[-1][1] else None
            found = self.call(lambda: (_C.region_tag(), _C.region_depth()), thread=asked).result
            require(found == (tag, len(stack)), f"thread {asked} is in {found}, not {tag}, {stack}")
