"""All ranks or none: pause, resume and swap on every rank of a `torch.distributed` group.

    import memsaver.distributed

    memsaver.distributed.pause("weights", group=group)   # every rank's memory is free, or no rank's
    memsaver.distributed.resume("weights", group=group)  # every rank has it again, or no rank has

The calls are collectives: every rank of the group makes the same calls in the same order, from one
thread at a time. They guarantee:

- **A barrier.** When a call returns, it has ended on all ranks.
- **All or none.** If a call fails on a rank, each rank undoes its own changes of this call, and all
  raise the same `RankError`, which names the failed ranks and the reasons. Tags that a rank had
  paused or resumed before the call keep that state. The error lists each rank whose rollback also
  failed (for example because another process allocated the memory), with the state of its tags.
- **Bounded waits.** An exception on one rank (an unknown tag, a bad argument, a callback that
  raises) reaches all others at their next step. If ranks make different calls, all of them raise
  before anything is changed. If a rank died or hangs, the others raise `GroupError`, at once or
  after `timeout`, and undo their changes. torch then closes the group's connections.
- **An invalid `group` on one rank.** If it is not a process group, or was destroyed, the rank looks
  in torch's store for the group on which other ranks wait for it, for at most `timeout`, and
  reports the failure there: all ranks raise a `RankError` at once. If it is another valid group of
  the rank, or None while the others pass a subgroup, no rank can know which group is right: each
  waits until `timeout` and raises `GroupError`. A rank that is not in its `group` raises
  `InvalidStateError` at once, because all ranks outside a group may do so, and the others wait for
  it until `timeout`. A `timeout` of None means the group's own timeout, and 30 minutes for a rank
  that looks for a group.
- **Contents.** Contents with a backup are never lost. A pause begins on all ranks before it runs on
  any, so that a rejected pause fails before contents without a backup are lost; if it fails later,
  these contents are zero on ranks that had paused them.
- **Callbacks** of `memsaver.on_pause` and `on_resume` run on each rank for its own part of the
  call. They must not wait for callbacks of other ranks, because a failing rank does not call its
  callbacks. A rollback calls the callbacks of the opposite transition.
- **Signals.** An interrupt (Ctrl-C) during a call is raised after the call, and nothing is undone.
  Python's other signal handlers run after the call too, when no tag is reserved, so a handler may
  pause tags. After an interrupt before or after a call, the other ranks wait in their next call
  until `timeout`.

The ranks communicate over the CPU, so that nothing depends on device memory. A group without a CPU
backend (`init_process_group("nccl")`) gets a gloo backend from memsaver when it is first used, with
torch's default timeout. After a timeout torch closes the group's connections; to keep a group that
other code uses, pass a separate one, created by `torch.distributed.new_group(backend="gloo")`.

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
