"""Defines the base class of scenarios, which consist of memory, an act under faults, and checks.

One process uses a scenario repeatedly. `prepare` brings the scenario from rest to the start of the
act, regardless of earlier results. `check_unchanged` checks that a failed act changed nothing.
`check_done` checks the result of the act. `rest` restores the initial state without leaks.
"""

from __future__ import annotations

from typing import ClassVar

from faults.machine import MIB, Group, Machine

GPU_GRANULE = 2 * MIB  # the granularity of device memory on GPUs
SMALL_GRANULE = MIB // 8


def require(holds: bool, what: str) -> None:
    """Raise an AssertionError that describes a violation."""
    if not holds:
        raise AssertionError(what)


class Scenario:
    devices = 1
    # The granularity of device memory. Most scenarios use a smaller one than GPUs, because most of
    # their time would be copies of pages; the library makes the same calls for as many pages.
    granule = GPU_GRANULE
    fresh = False  # whether each act needs a new process, because it runs only once per process
    options: ClassVar[dict[str, str]] = {}
    standing: ClassVar[dict[str, int]] = {}  # calls that the system rejects permanently
    grows: frozenset[str] = frozenset()  # figures that each act increases

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.memsaver, self.sim = machine.memsaver, machine.sim
        self.bystander = self.group("bystander", "host")

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of a tag's blocks: the first two share a page, and the last has two
        pages.
        """
        return [4096, 100_000, self.granule + 512]

    def group(self, name: str, backup: str | None, tags: int = 1, shareable: bool = False) -> Group:
        names = [f"{name}-{i}-of-{self.name}" for i in range(tags)]
        return Group(self.machine, names, backup, shareable)

    def build(self) -> None:
        """Allocate the scenario's permanent memory. The method is called once."""
        self.bystander.allocate([4096])
        self.bystander.fill()

    def prepare(self) -> None:
        raise NotImplementedError

    def act(self) -> None:
        """Run the act under test. The method is called on its own thread."""
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
