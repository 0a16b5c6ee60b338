"""Find the channels on which a rank with an invalid group reports its error to other ranks.

Such a rank does not know on which of its groups the other ranks are waiting. All ranks record in
torch's store how many collectives of each group they have reached. The rank compares these numbers
for each of its groups to find the one on which other ranks are waiting.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Sequence
from typing import Any

from memsaver._runtime.interrupts import interruptible
from memsaver.distributed.channel import Channel
from memsaver.distributed.errors import GroupError
from memsaver.distributed.groups import modules, refusal_of
from memsaver.errors import MemsaverError

__all__ = ["AwaitedChannels", "channel_of"]

_LOOK_SECONDS = 0.02  # time between the first two reads of the store; doubles after each read
_MOST_LOOK_SECONDS = 0.2  # the longest time between two reads


def channel_of(
    group: Any, what: str, timeout: float | None, lane: str = ""
) -> tuple[Channel, MemsaverError | None]:
    """Return the group's channel, or the channel on which other ranks wait, and an error or None.

    Args:
        group: the group that the caller passed; None means the world.
        what: a description of the call, for the error message.
        timeout: seconds to search for a group on which other ranks wait. See
            `AwaitedChannels.find_waiting`.
        lane: see `Channel`.

    Raises:
        InvalidStateError: this rank is not in the group, or torch.distributed is not initialized.
        ConfigError: the group is invalid, and torch.distributed is not initialized.
        GroupError: the group is unusable, and the search found no other rank that waits for this
            rank within `timeout`.
        NotLoadedError: see `Channel`.
    """
    refused = refusal_of(group)
    if refused is None:
        return Channel(group, lane), None
    return AwaitedChannels([lane]).find_waiting(refused, what, timeout), refused


class AwaitedChannels:
    """The channels on which other ranks may wait for a rank that does not know which group to use.

    Create one object for each call. A call can use several channels, one after the other. The
    channels' numbers are fixed when the object is created, so a search does not find ranks that
    stop waiting during the search and then call again.

    Args:
        lanes: the lanes on which the other ranks may wait.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._world, *self._others = _channels(lanes)

    def find_waiting(self, refused: Exception, what: str, timeout: float | None) -> Channel:
        """Find a channel on which another rank waits for this rank.

        The result is the world's channel if all other ranks wait on that channel, including ranks
        that do not know which group to use. If this rank has no other channel, the method returns
        the world's channel without a search.

        Args:
            refused: this rank's own error, such as the error for an invalid group. This error
                becomes the cause of a `GroupError`.
            what: a description of the call, for the error message.
            timeout: seconds to search; None means the default timeout of torch's groups, 30
                minutes.

        Raises:
            GroupError: no other rank waited on any of this rank's groups in time, or torch's store
                does not respond.
            KeyboardInterrupt: a signal handler raised this exception during the search. Other
                exceptions from a handler propagate in the same way. Ranks that wait for this rank
                continue to wait until their own timeout.
        """
        world = self._world
        if not self._others or len(world.ranks) == 1:
            return world
        if timeout is None:
            timeout = modules()[1].distributed_c10d.default_pg_timeout.total_seconds()
        found: Channel | None = None
        try:
            world.announce()
            try:
                found = self._look(time.monotonic() + timeout)
            finally:
                if found is not world:
                    with contextlib.suppress(RuntimeError):  # the store does not answer
                        world.withdraw()
        except RuntimeError as error:
            raise GroupError(
                f"{what}: {refused}; and torch's store does not answer: {error}"
            ) from refused
        if found is None:
            raise GroupError(
                f"{what}: {refused}; no other rank waited for this one on any of its groups within "
                f"{timeout:g} s"
            ) from refused
        return found

    def _look(self, end: float) -> Channel | None:
        """Search for a channel on which another rank waits, until `end` (of `time.monotonic`)."""
        world, pause = self._world, _LOOK_SECONDS
        while len(world.waiting()) < len(world.ranks) - 1:
            found = next((channel for channel in self._others if channel.waiting()), None)
            if found is not None or time.monotonic() >= end:
                return found
            interruptible(functools.partial(time.sleep, pause))
            pause = min(2 * pause, _MOST_LOOK_SECONDS)
        return world

    def for_ranks(self, ranks: Collection[int], lane: str) -> Channel | None:
        """Return this rank's channel of a lane between these ranks, or None if no group has exactly
        those ranks.
        """
        for channel in (self._world, *self._others):
            if channel.lane == lane and set(channel.ranks) == set(ranks):
                return channel
        return None

    def close(self) -> None:
        """Close the channels. Idempotent."""
        for channel in (self._world, *self._others):
            channel.close()


def _channels(lanes: Sequence[str]) -> list[Channel]:
    """Return a channel for each lane of each of this rank's groups, the world first.

    Groups with the same ranks share named lanes, so only the first of these groups is included if
    the lanes have names.
    """
    dist = modules()[1]
    world = dist.group.WORLD
    known = dist.distributed_c10d._world.pg_group_ranks
    channels = [Channel(world, lanes[0])]
    groups, seen = [(world, lanes[1:])], {frozenset(known[world])}
    for group, ranks in known.items():
        is_same = bool(lanes[0]) and frozenset(ranks) in seen
        if group is not world and len(ranks) > 1 and not is_same:
            groups.append((group, lanes))
            seen.add(frozenset(ranks))
    for group, its_lanes in groups:
        for lane in its_lanes:
            with contextlib.suppress(MemsaverError):  # a group that lacks gloo
                channels.append(Channel(group, lane))
    return channels
