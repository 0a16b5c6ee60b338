"""Tests collective calls of a group: ranks exchange results and errors, some of which cannot be
pickled.
"""

import textwrap

import pytest
import rank_processes

from memsaver.errors import ConfigError
from memsaver.integrations.rollout.together import Together


def test_a_process_alone_raises_errors_as_they_are():
    together, own = Together(), ConfigError("it")

    def fail():
        raise own

    assert together.gather("a call", lambda: 5) == [5]
    for call in (lambda: together.gather("a call", fail), lambda: together.wait("a call", own)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value is own


CODE = """
import datetime, os, threading
import torch.distributed as dist
from memsaver.distributed import GroupError, RankError
from memsaver.errors import *
from memsaver.distributed import messages
from memsaver.integrations.rollout.together import Together
from rank_calls import gathered
from refusals import refused

RANK = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
group = dist.new_group([2, 0, 1])
together = Together(group, 20)

class Mismatch(MemsaverError):
    _status = "MISMATCH"
    tensors = ()

def fails(kind, call, *arguments):
    error = refused(MemsaverError, call, *arguments)
    assert type(error) is kind, repr(error)
    everyones = gathered((str(error), error.failures))
    assert everyones == [everyones[0]] * 3, everyones
    return error

def throw(error):
    raise error

# Results of any size and kind, those of the leader and those of all.
leader = together.is_leader
assert [one for one in together.gather("who", lambda: RANK if leader else None) if one is not None]
for size in (0, 1, 3_000_000):
    given = together.on_leader("bytes", lambda: (size, b"x" * size) if leader else throw(OSError()))
    assert given == (size, b"x" * size)
    sizes = together.gather("more bytes", lambda: b"y" * (size * RANK))
    assert sorted(map(len, sizes)) == [0, size, 2 * size]
order = together.gather("order", lambda: RANK)
assert sorted(order) == [0, 1, 2] and leader == (RANK == order[0])
first = order[0]
assert together.gathered("sum", lambda: RANK, sum) == 3

# An error arrives with its type, tag, status, numbers and other attributes.
def no_memory():
    error = OutOfDeviceMemoryError("no room", tag="kv_cache")
    error.needed, error.free, error.device = 10, 3, RANK
    raise error
error = fails(OutOfDeviceMemoryError, together.on_leader, "wake_up()", no_memory)
assert (error.needed, error.free, error.device) == (10, 3, first) and error.tag == "kv_cache"
assert error.status == "OUT_OF_DEVICE_MEMORY" and error.failures[first].message == "no room"
assert f"wake_up() failed on rank {first} of 3" in str(error) and "no room" in str(error)
assert (error.__cause__ is not None) == (RANK == first)

mismatch = Mismatch("two tensors differ")
mismatch.tensors = ("a", "b")
error = fails(Mismatch, together.wait, "update", mismatch if RANK == 1 else None)
assert error.tensors == ("a", "b") and list(error.failures) == [1]

# Backup errors are OSErrors as well; one that cannot be pickled arrives in words.
error = fails(BackupError, together.wait, "save", BackupError("disk", tag="w") if RANK else None)
assert sorted(error.failures) == [1, 2] and "ranks 1-2 of 3" in str(error)
odd = Mismatch("has a lock")
odd.lock = threading.Lock()
error = fails(RankError, together.wait, "update", odd if RANK == 2 else None)
assert error.failures[2].kind == "Mismatch" and "has a lock" in str(error)
error = fails(RankError, together.on_leader, "a result", threading.Lock)
assert "cannot pickle" in str(error)
"""

# Values that only some ranks can unpickle, and invalid arguments on one rank.
ODD = """
class Fragile:
    # Cannot be unpickled on some ranks.
    def __init__(self, where):
        self.where = where

    def __setstate__(self, state):
        self.__dict__.update(state)
        if RANK in self.where:
            raise OSError("not here")

for call in (
    lambda: together.gather("fragile", lambda: Fragile([1]) if RANK == 2 else None),
    lambda: together.on_leader("fragile", lambda: Fragile([1])),
    lambda: together.gathered("fragile", lambda: Fragile([1]), len),
):
    error = fails(RankError, call)
    assert list(error.failures) == [1] and "OSError: not here" in str(error)
assert together.gather("then", lambda: RANK) == order

class OddError(Exception):
    __str__ = lambda self: 1 / 0

error = fails(RankError, together.wait, "odd", OddError() if RANK == 0 else None)
assert error.failures[0].kind == "OddError"
error = fails(ConfigError, Together, "odd" if RANK == 1 else dist.group.WORLD, 20, "odd group")
assert list(error.failures) == [1]
error = fails(ConfigError, Together, group, -1 if RANK == 1 else 20, "odd time")
assert list(error.failures) == [1]
"""

# An interrupt on one rank at any time in a call: the others raise or have finished, and the group
# stays usable.
INTERRUPTS = """
import signal

def interrupt():
    signal.raise_signal(signal.SIGINT)

def during(call):
    # Returns this rank's outcome in words: its result, its interrupt, or the others' failures.
    try:
        return call()
    except KeyboardInterrupt:
        return "interrupted"
    except RankError as error:
        return error.failures[1].kind

elsewhere = ["KeyboardInterrupt", "interrupted", "KeyboardInterrupt"]
for number in (1, 2):
    # In this rank's own work, in each step.
    work = lambda: interrupt() if RANK == 1 else None
    assert gathered(during(lambda: together.gather("work", work))) == elsewhere
    assert gathered(during(lambda: together.gathered("work", work, len))) == elsewhere
    brought = KeyboardInterrupt() if RANK == 1 else None
    assert gathered(during(lambda: together.wait("an error", brought))) == elsewhere
    # Between the two exchanges of a call: the second one reports it to the others.
    original = together._ranks.attempt
    def attempt(*arguments, **named):
        outcomes = original(*arguments, **named)
        if RANK == 1 and not named.get("step"):
            interrupt()
        return outcomes
    together._ranks.attempt = attempt
    assert gathered(during(lambda: together.gathered("between", lambda: 1, len))) == elsewhere
    # In the last exchange of a call: the others finish, and this rank raises at its end.
    assert gathered(during(lambda: together.gather("last", lambda: 1))) == [
        [1] * 3, "interrupted", [1] * 3
    ]
    del together._ranks.attempt
    assert together.gather("then", lambda: RANK) == order
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
# Another signal, whose handler raises.
class Alarm(Exception):
    pass
def alarm(number, frame):
    raise Alarm()
signal.signal(signal.SIGALRM, alarm)
ring = lambda: signal.raise_signal(signal.SIGALRM) if RANK == 2 else None
error = fails(RankError, together.gather, "alarm", ring)
assert error.failures[2].kind == "Alarm"
assert isinstance(error.__cause__, Alarm if RANK == 2 else type(None))
"""


def test_calls_of_three_ranks_do_not_mix(tmp_path):
    code = CODE + textwrap.dedent(
        """
        # Different calls at the same time, and calls of another protocol.
        error = fails(RankError, together.wait, "left" if RANK else "right")
        assert "): right; ranks 1-2: left" in str(error) and error.failures[2].message == "left"
        ours = messages.PROTOCOL
        messages.PROTOCOL += RANK == 1
        error = fails(RankError, together.wait, "hello")
        assert f"rank 1: uses protocol {ours + 1}; install one version" in str(error)
        messages.PROTOCOL = ours
        # Two of them do not get in each other's way, whatever the order of their threads.
        other = Together(group, 20, "other")
        results = {}
        def in_thread():
            results["other"] = other.gather("slow", lambda: RANK)
        thread = threading.Thread(target=in_thread)
        if RANK == 1:
            results["mine"] = together.gather("fast", lambda: RANK)
            thread.start()
        else:
            thread.start()
            results["mine"] = together.gather("fast", lambda: RANK)
        thread.join(20)
        assert results == {"mine": order, "other": order}
        # Their connections and threads end with them.
        def held():
            return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]
        counts = []
        for _ in range(3):
            short = Together(group, 20, "short")
            assert short.gather("once", lambda: RANK) == order
            del short
            dist.barrier()
            counts.append(held())
        assert counts[2][0] < counts[0][0] + 4 and counts[2][1] < counts[0][1] + 2, counts
        """
    )
    rank_processes.run(code, 3, tmp_path, timeout=80)


def test_a_value_that_one_rank_cannot_send_or_read_is_an_error_on_all(tmp_path):
    rank_processes.run(CODE + ODD, 3, tmp_path, timeout=80)


def test_an_interrupt_on_one_rank_is_an_error_on_the_others(tmp_path):
    rank_processes.run(CODE + INTERRUPTS, 3, tmp_path, timeout=80)
