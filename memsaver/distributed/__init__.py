"""All ranks or none: pause, resume and swap on every rank of a `torch.distributed` group.

    import memsaver.distributed

    memsaver.distributed.pause("weights", group=group)   # every rank's memory is free, or no rank's
    memsaver.distributed.resume("weights", group=group)  # every rank has it again, or no rank has

They are collectives: every rank of the group makes the same calls in the same order, from one
thread at a time. What they promise:

- **A fence.** Where a call returns, it is done on all ranks.
- **All or none.** Where it fails on a rank, each rank takes back what this call changed on it, and
  all raise the same `RankError`, which names the ranks that failed and says why. What a rank had
  paused or resumed before stays as it was. A rank whose way back is barred too (say another process
  took the memory meanwhile) is named with the state of its tags.
- **Nobody waits for ever.** An exception on one rank (an unknown tag, a bad argument, a callback
  that raises) reaches all others at their next step; ranks that make different calls find out
  before anything is changed. A rank that died or hangs is a `GroupError` on the others, at once or
  when `timeout` is over: each of them takes back what it did. torch closes the group's connections
  then.
- **A wrong `group` on one rank.** If it is no process group, or one that was destroyed, the rank
  looks in torch's store for the group on which other ranks wait for it, at most for `timeout`, and
  fails there: all ranks raise a `RankError` at once. If it is another group of the rank's, or None
  beside a group of some ranks, no rank can know which of the groups is the right one: each waits
  until `timeout` is over, and raises `GroupError`. A rank that is not in its `group` raises
  `InvalidStateError` at once, as all ranks outside of a group may do, and the others wait for it
  until `timeout`. A `timeout` of None is the one that the group was made with, and 30 minutes for
  a rank that looks for a group.
- **Contents.** What has a backup keeps its bytes whatever happens. A pause is first begun on all
  ranks and then done on all, so that what can be refused is refused before contents without a
  backup are given up; if it fails after that, they are zeros where the rank had paused them.
- **Callbacks** of `memsaver.on_pause` and `on_resume` run on each rank with its own part of the
  call. They must not wait for callbacks of other ranks: one that fails calls none. Where the call
  is taken back, those for the way back are called.
- **Signals.** Ctrl-C during a call is raised when the call is over, and takes nothing back. All
  other signal handlers of Python run then, too, when the call holds no tag: a handler may pause.
  An interrupt before a call or after it leaves the other ranks to wait until `timeout` is over.

The ranks talk over the CPU, so that nothing depends on memory that is being paused or is full. A
group that has no backend for it (`init_process_group("nccl")`) gets one of its own from memsaver,
over gloo, when it is first used; its timeout is torch's default. A group made for the purpose, by
`torch.distributed.new_group(backend="gloo")`, keeps a timeout from closing one that others use.

Importing this does not import torch.
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
