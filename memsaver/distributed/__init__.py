"""Pause, resume and swap on every rank of a `torch.distributed` group, or on none.

    import memsaver.distributed

    memsaver.distributed.pause("weights", group=group)   # every rank's memory is free, or no rank's
    memsaver.distributed.resume("weights", group=group)  # every rank has it again, or no rank has

The calls are collectives: every rank of the group must make the same calls in the same order, from
one thread at a time. The calls have these properties:

- **A barrier.** When a call returns, it has ended on all ranks.
- **All or none.** If a call fails on a rank, each rank undoes the changes that it made during the
  call. All ranks raise the same `RankError`, which names the failed ranks and the reasons. Tags
  that a rank had paused or resumed before the call keep their state. If the rollback on a rank also
  fails (for example, because another process has allocated the memory), the error lists this rank
  and the state of its tags.
- **Bounded waits.** If a call raises an exception on one rank (an unknown tag, a bad argument, a
  callback that raises), all other ranks receive the exception at their next step. If ranks make
  different calls, all of them raise before any change. If a rank has died or hangs, the other ranks
  raise `GroupError`, at once or after `timeout`, and undo their changes. torch then closes the
  group's connections.
- **An invalid `group` on one rank.** If `group` is not a process group, or was destroyed, the rank
  searches torch's store for the group on which other ranks are waiting for it. The search takes at
  most `timeout`. The rank then reports the failure to that group, and all ranks raise a `RankError`
  at once. If `group` is a valid group of the rank but the wrong one, or is None while the other
  ranks pass a subgroup, no rank can detect the mistake: each rank waits until `timeout` and raises
  `GroupError`. A rank that is not in its `group` raises `InvalidStateError` at once, because any
  rank outside a group may make this call. If other ranks expect this rank to take part, they wait
  until `timeout`. If `timeout` is None, the group's own timeout applies, or 30 minutes for a rank
  that searches for a group.
- **Contents.** Contents with a backup are never lost. A pause begins on all ranks before it runs on
  any rank, so a rejected pause fails before contents without a backup are lost. If a pause fails
  later, contents without a backup are zero on the ranks that had paused them.
- **Callbacks.** Callbacks registered with `memsaver.on_pause` and `on_resume` run on each rank for
  its own part of the call. Callbacks must not wait for callbacks of other ranks, because a rank
  that fails does not call its callbacks. A rollback calls the callbacks of the opposite transition.
- **Signals.** An interrupt (Ctrl-C) during a call is raised after the call, and nothing is undone.
  Other Python signal handlers also run after the call, when no tag is reserved, so a handler can
  pause tags. If an interrupt prevents a rank from making its next call, the other ranks wait in
  that call until `timeout`.

The ranks communicate through a CPU backend, so the calls do not depend on device memory. If a group
has no CPU backend (`init_process_group("nccl")`), memsaver adds a gloo backend at the first call,
with torch's default timeout. After a timeout, torch closes the group's connections. To protect a
group that other code uses, pass a separate group, created by
`torch.distributed.new_group(backend="gloo")`.

Importing this package does not import torch.
"""

from memsaver.distributed.calls import pause, paused, resume, swap
from memsaver.distributed.errors import GroupError, RankError, RankFailure
from memsaver.distributed.reports import GroupReport, RankFigures

__all__ = [
    "GroupError",
    "GroupReport",
    "RankError",
    "RankFailure",
    "RankFigures",
    "pause",
    "paused",
    "resume",
    "swap",
]
