"""What every scenario has: memory, an act under faults, and what must hold before and after it.

A scenario is used over and over in one process: `prepare` brings it from rest to where the act
starts, whatever happened before; `check_unchanged` says that a failed act left that as it was,
`check_done` that the act was done; `rest` brings everything back, and nothing may be left then.
"""

from __future__ import annotations

from typing import ClassVar

from faults.machine import MIB, Group, Machine

SIZES = [4096, 100_000, 2 * MIB + 512]


def require(holds: bool, what: str) -> None:
    """An AssertionError that says what does not hold."""
    if not holds:
        raise AssertionError(what)


class Scenario:
    devices = 1
    fresh = False  # a process of its own for each act: what is done once in a process
    options: ClassVar[dict[str, str]] = {}
    standing: ClassVar[dict[str, int]] = {}  # calls that the system refuses for good
    grows: frozenset[str] = frozenset()  # figures that each act adds to

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.memsaver, self.sim = machine.memsaver, machine.sim
        self.bystander = self.group("bystander", "host")

    def group(self, name: str, backup: str | None, tags: int = 1) -> Group:
        return Group(self.machine, [f"{name}-{i}-of-{self.name}" for i in range(tags)], backup)

    def build(self) -> None:
        """Once: the memory that lives all the time."""
        self.bystander.allocate([4096])
        self.bystander.fill()

    def prepare(self) -> None:
        raise NotImplementedError

    def act(self) -> None:
        """On a thread of its own."""
        raise NotImplementedError

    def check_unchanged(self, error: Exception) -> None:
        raise NotImplementedError

    def check_done(self) -> None:
        raise NotImplementedError

    def rest(self) -> None:
        self.memsaver.trim(wait=True)

    def check_bystander(self) -> None:
        require(self.bystander.states() == {"mapped"}, "a tag that was not asked for has changed")
        require(self.bystander.is_intact(), "contents of a tag that was not asked for are lost")
