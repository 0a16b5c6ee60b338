"""All ranks or none: groups of processes on simulated devices, with faults in some of them.

Importing torch takes seconds in each process, so a set of processes goes through many scenes. Each
scene begins and ends with everything mapped and is checked by every rank for itself.
"""

import textwrap

import pytest
import rank_processes

pytest.importorskip("torch")

# What every rank starts with.
PRELUDE = """
import contextlib, datetime, gc, os, signal, sys, time, warnings
import memsaver
import memsaver.distributed as md
from simulated_driver import Block, Simulator
assert "torch" not in sys.modules
from rank_calls import gathered, lost

import torch.distributed as dist

sim = Simulator()
MIB = 1 << 20
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
warnings.simplefilter("error")

def begin(backend, **named):
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30), **named)

def blocks(tag, sizes, backup=None):
    with memsaver.region(tag, backup=backup):
        return [Block(sim, nbytes, 100 * RANK + i + 1) for i, nbytes in enumerate(sizes)]

def states(*tags):
    return [str(memsaver.state(tag)) for tag in tags]

def intact(several):
    return all(block.is_intact() for block in several)

def held(*tags):
    return sum(row.resident_bytes for row in memsaver.stats().tags if row.tag in tags)

def refused(call, *arguments, **named):
    # The error, which must be the same on all ranks.
    try:
        call(*arguments, **named)
    except md.RankError as error:
        same = gathered((str(error), error.failures, error.stuck, error.tag, error.status))
        assert all(other == same[0] for other in same), same
        return error
    raise AssertionError("no rank failed")

def raises(kind, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        return error
    raise AssertionError(f"{call} did not raise {kind}")

def fault(call, *, on, times=0, code=1):
    # Fails the call for as long as the block lasts, on one rank.
    return sim.fault(call, code, 1, times) if RANK == on else contextlib.nullcontext()

@contextlib.contextmanager
def registered(register, function, *, on):
    registration = register(function) if RANK == on else None
    try:
        yield
    finally:
        if registration:
            registration.remove()

@contextlib.contextmanager
def full(on):
    # Another process holds what a device has left, on one rank.
    free, _ = memsaver.device_memory(0)
    if RANK == on:
        sim.occupy(free)
    try:
        yield
    finally:
        sim.occupy(0)
"""


@pytest.fixture
def run_ranks(tmp_path):
    """Runs code in as many processes as a group has ranks: `run_ranks(code, 3)`.

    Every one of them must end well, but those whose exit status is given: `statuses={2: 7}`.
    """

    def run(code, size, statuses=None, timeout=60):
        text = PRELUDE + textwrap.dedent(code) + "\nassert sim.violations() == []\n"
        rank_processes.run(text, size, tmp_path, statuses=statuses, timeout=timeout, fresh=True)

    return run


def test_all_ranks_or_none(run_ranks):
    # What fails on one rank while the call is done there.
    run_ranks(
        """
        error = raises(memsaver.InvalidStateError, md.pause, "w")
        assert "init_process_group" in str(error) and "memsaver.pause" in str(error)
        begin("gloo")
        memsaver.configure(share_bytes="2MiB", slab_bytes="2MiB")
        weights, cache = blocks("w", [3 * MIB, 4096], "host"), blocks("kv", [5 * MIB])
        extra = blocks("extra", [MIB], "pageable")
        cache_was_saved = blocks("saved once", [2 * MIB, 512])

        # Done on all when it returns on any: rank 2 needs longer.
        resident = held("w", "kv", "extra", "saved once")
        dist.barrier()
        start = time.monotonic()
        if RANK == 2:
            sim.stream_delay(0.4)
        report = md.pause()
        end = time.monotonic()
        sim.stream_delay(0)
        assert states("w", "kv", "extra", "saved once") == ["paused"] * 4
        times = gathered((start, end, resident))
        assert report.slowest.rank == 2 and report.ranks[2].seconds >= 0.4
        assert min(end for _, end, _ in times) >= times[2][0] + report.ranks[2].seconds
        assert report.seconds >= report.ranks[2].seconds
        assert [rank.rank for rank in report.ranks] == [0, 1, 2]
        assert [rank.bytes for rank in report.ranks] == [resident for _, _, resident in times]
        assert report.local.bytes == resident and report.bytes == sum(t[2] for t in times)
        assert report.local.copied_bytes == report.ranks[RANK].copied_bytes > 3 * MIB
        assert gathered(report.ranks) == [report.ranks] * 3
        assert md.resume().local.changed == ("w", "kv", "extra", "saved once")
        assert intact(weights + extra) and all(b.is_zero() for b in cache + cache_was_saved)
        for block in cache + cache_was_saved:
            block.fill(block.seed)

        # No memory for a resume on rank 1; rank 0 has one of the tags mapped already, and one was
        # saved although its regions did not ask for it.
        md.pause("saved once", backup="host")
        md.pause("w", "kv", "extra", timeout=20)
        if RANK == 0:
            memsaver.resume("extra")
        names = ("w", "kv", "extra", "saved once")
        before = states(*names)
        with full(on=1):
            error = refused(md.resume, *names)
            assert states(*names) == before == ["paused"] * 2 + [
                "mapped" if RANK == 0 else "paused", "paused"
            ]
            assert held("w", "kv", "saved once") == 0
            assert list(error.failures) == [1] and error.stuck == {}
            failure = error.failures[1]
            assert failure.kind == "OutOfDeviceMemoryError" and failure.host
            assert failure.status == "OUT_OF_DEVICE_MEMORY" and failure.tag in names
            assert error.status == "RANK_FAILED" and error.tag == failure.tag
            assert "resume('extra', 'kv', 'saved once', 'w') failed on rank 1 of 3" in str(error)
            assert failure.message in str(error)
            cause = memsaver.OutOfDeviceMemoryError if RANK == 1 else type(None)
            assert isinstance(error.__cause__, cause)
        assert sorted(md.resume(*names).local.changed) == sorted(
            set(names) - ({"extra"} if RANK == 0 else set())
        )
        assert intact(weights + extra + cache_was_saved) and all(b.is_zero() for b in cache)

        # A pause of one rank cannot save; the others had paused, with a backup or without.
        with fault("cuMemHostRegister", on=2), fault("cuMemcpyDtoHAsync", on=2):
            memsaver.trim(wait=True)
            for block in weights:
                block.fill(block.seed + 50)
            error = refused(md.pause, "w")
        assert list(error.failures) == [2] and error.failures[2].tag == "w"
        assert states("w") == ["mapped"] and intact(weights)

        # A swap, done and not done.
        md.pause("kv")
        with full(on=0), fault("cuMemcpyDtoHAsync", on=1), fault("cuMemHostRegister", on=1):
            memsaver.trim(wait=True)
            memsaver.configure(fingerprints=False)
            error = refused(md.swap, out="w", into=["kv"])
            assert 1 in error.failures and states("w", "kv") == ["mapped", "paused"]
            memsaver.configure(fingerprints=True)
        assert intact(weights)
        report = md.swap(out=["w"], into="kv")
        assert states("w", "kv") == ["paused", "mapped"]
        assert sorted(report.local.changed) == ["kv", "w"]
        md.resume("w")
        assert intact(weights)

        # The way back is barred too.
        md.pause("w")
        with full(on=1), fault("cuMemcpyDtoHAsync", on=0), fault("cuMemHostRegister", on=0):
            if RANK == 0:
                memsaver.configure(fingerprints=False)
            error = refused(md.resume, "w")
            assert list(error.failures) == [1] and list(error.stuck) == [0]
            assert states("w") == ["mapped" if RANK == 0 else "paused"]
            assert "rank 0" in str(error) and "'w' is mapped" in error.stuck[0].message
        memsaver.configure(fingerprints=True)
        assert md.resume("w").local.changed == (("w",) if RANK else ())
        assert intact(weights)
        with fault("cuMemcpyDtoHAsync", on=2), fault("cuMemHostRegister", on=2):
            with fault("cuMemCreate", on=1, code=2):
                if RANK == 2:
                    memsaver.trim(wait=True)
                for block in weights:
                    block.fill(block.seed + 1)
                error = refused(md.pause, "w")
            assert list(error.failures) == [2] and list(error.stuck) == [1]
            assert "'w' is paused" in str(error) and "OutOfDeviceMemoryError" in str(error)
            assert states("w") == ["paused" if RANK == 1 else "mapped"]
        md.resume("w")
        assert states("w") == ["mapped"] and intact(weights)

        # A group of some ranks; the ranks' numbers are the world's.
        pair = dist.new_group([0, 2])
        if RANK == 1:
            error = raises(memsaver.InvalidStateError, md.pause, group=pair)
            assert "not in the group" in str(error)
            assert states("w") == ["mapped"]
        else:
            report = md.pause("w", group=pair)
            assert [rank.rank for rank in report.ranks] == [0, 2]
            with full(on=2):
                error = raises(md.RankError, md.resume, "w", group=pair)
            assert list(error.failures) == [2] and "rank 2 of 2" in str(error)
            assert md.resume("w", group=pair).local.changed == ("w",)
            assert intact(weights)
        dist.barrier()

        # A pause of rank 0 can neither be done nor undone: its pages are kept, and what is in them
        # outlives a resume that is taken back, although the tag has no backup.
        cache = blocks("parts", [2 * MIB] * 4)
        if RANK == 0:
            sim.fail("cuMemMap", 1, 1, 0)
            sim.fail("cuMemUnmap", 1, 3, 1)
        error = refused(md.pause, "parts")
        sim.clear_faults()
        assert list(error.failures) == [0] == list(error.stuck) and error.failures[0].kind
        assert states("parts") == ["mapped" if RANK else "paused"]
        md.pause("parts")
        assert (held("parts") > 0) == (RANK == 0)
        with full(on=1):
            error = refused(md.resume, "parts")
        assert list(error.failures) == [1] and held("parts") == 0
        md.resume("parts")
        assert intact(cache) if RANK == 0 else all(block.is_zero() for block in cache)
        dist.barrier()
        group = dist.group.WORLD
        dist.destroy_process_group()
        raises(memsaver.InvalidStateError, md.pause, "w")
        store = dist.FileStore("store", SIZE)  # the first one's port may still be in use
        begin("gloo", store=store, rank=RANK, world_size=SIZE)
        raises(memsaver.InvalidStateError, md.pause, "w", group=group)
        error = refused(md.pause, "w", group="gloo" if RANK == 1 else None)
        assert list(error.failures) == [1] and error.failures[1].kind == "ConfigError"
        with md.paused("w"):
            assert states("w") == ["paused"]
        assert intact(weights)
        dist.destroy_process_group()
        """,
        3,
    )


@pytest.mark.long
def test_what_is_refused_before_anything_changes(run_ranks):
    run_ranks(
        """
        begin("gloo")
        weights, cache = blocks("w", [3 * MIB], "host"), blocks("kv", [MIB])
        blocks(f"only on {RANK}", [MIB])
        told = []
        memsaver.on_pause(lambda tag: told.append(("pause", tag)))
        memsaver.on_resume(lambda tag: told.append(("resume", tag)))

        def unchanged():
            assert states("w", "kv") == ["mapped"] * 2 and intact(weights + cache)
            return not told

        def throw(error):
            raise error

        class Odd:
            __repr__ = __eq__ = __hash__ = lambda self, *_: 1 / 0

        class OddName(str):
            __repr__ = __str__ = __hash__ = lambda self, *_: 1 / 0

        class OddList(list):
            __iter__ = __len__ = lambda self, *_: 1 / 0

        class OddError(Exception):
            __str__ = lambda self: 1 / 0

        # Arguments that are wrong on one rank.
        error = refused(md.pause, "w", "only on 1")
        assert list(error.failures) == [0, 2] and error.failures[0].kind == "UnknownTagError"
        assert error.tag == "only on 1" and "ranks 0, 2 of 3" in str(error) and unchanged()
        error = refused(md.pause, "w", backup="tape" if RANK == 1 else None)
        assert list(error.failures) == [1] and "tape" in str(error) and unchanged()
        error = refused(md.pause, "w", timeout=-1 if RANK == 2 else 20)
        assert list(error.failures) == [2] and "timeout" in str(error) and unchanged()
        error = refused(md.pause, 7 if RANK == 0 else "w")
        assert list(error.failures) == [0] and unchanged()
        error = refused(md.pause, "w", group=Odd() if RANK == 2 else None)
        assert list(error.failures) == [2] and "not Odd" in str(error) and unchanged()
        for odd in (Odd(), OddName("w"), OddName("x")):
            error = refused(md.pause, odd if RANK == 1 else "w")
            assert list(error.failures) == [1] and "pause('w') failed" in str(error)
            assert unchanged()
        error = refused(md.swap, out=OddList("w") if RANK == 0 else "w", into="kv")
        assert list(error.failures) == [0] and unchanged()
        with registered(memsaver.on_pause, lambda tag: throw(OddError()), on=1):
            error = refused(md.pause, "w")
        assert list(error.failures) == [1] and error.failures[1].kind == "OddError"
        assert states("w") == ["mapped"]
        told.clear()
        error = refused(md.swap, out="w", into="w")
        assert list(error.failures) == [0, 1, 2] and unchanged()
        assert str(error).count("both paused and resumed") == 1

        # Different calls.
        error = refused(md.resume if RANK == 1 else md.pause, "w")
        assert list(error.failures) == [0, 1, 2] and error.failures[1].kind == "" and unchanged()
        assert "ranks 0, 2: pause('w')" in str(error) and "resume('w')" in str(error)
        error = refused(md.pause, *(["w", "kv"] if RANK else ["w"]))
        assert "pause('kv', 'w')" in str(error) and "pause('w')" in str(error) and unchanged()
        error = refused(md.pause, *(["w", "kv"] if RANK else []))
        assert "pause(every tag)" in str(error) and unchanged()
        md.pause(*(["w", "kv", "w"] if RANK else ["kv", "w"]), backup="disk" if RANK else "host")
        assert states("w", "kv") == ["paused"] * 2
        md.resume("kv", "w")
        assert intact(weights + cache)
        assert sorted(told[:2]) == [("pause", "kv"), ("pause", "w")] and len(told) == 4
        told.clear()

        # Another version, by its protocol.
        from memsaver.distributed import messages
        ours = messages.PROTOCOL
        messages.PROTOCOL += RANK == 1
        error = refused(md.pause, "w")
        assert f"ranks 0, 2: speaks protocol {ours}; install" in str(error) and unchanged()
        assert error.failures[1].message.startswith(f"speaks protocol {ours + 1};")
        messages.PROTOCOL = ours

        # What one rank cannot begin is not begun on others: what has no backup keeps its bytes.
        with memsaver.region("kv") if RANK == 1 else contextlib.nullcontext():
            error = refused(md.pause, "w", "kv")
        assert list(error.failures) == [1] and error.failures[1].kind == "InvalidStateError"
        assert not unchanged() and [kind for kind, _ in told] == ["pause"] * 2 + ["resume"] * 2
        told.clear()

        # Callbacks that raise.
        def fail(tag):
            raise ValueError(f"not {tag}")

        with registered(memsaver.on_pause, fail, on=0):
            error = refused(md.pause, "w", "kv")
        assert list(error.failures) == [0] and error.failures[0].kind == "ValueError"
        assert isinstance(error.__cause__, ValueError if RANK == 0 else type(None))
        assert error.failures[0].status == "" and not unchanged()
        md.pause("w", "kv", backup="pageable")
        with registered(memsaver.on_resume, fail, on=2):
            error = refused(md.resume, "w", "kv")
        assert error.failures[2].message == "not w" and states("w", "kv") == ["paused"] * 2
        md.resume("w", "kv")
        assert intact(weights + cache)

        # A callback that fails on the way back only: that rank is back, and warns.
        md.pause("w")
        with full(on=1), registered(memsaver.on_pause, fail, on=2):
            error = refused(md.resume, "w")
        assert list(error.failures) == [1] and list(error.stuck) == [2]
        assert states("w") == ["mapped" if RANK == 2 else "paused"], "a pause asks first"
        md.resume("w")
        assert intact(weights)
        warned = contextlib.nullcontext()
        with fault("cuMemcpyDtoHAsync", on=0), fault("cuMemHostRegister", on=0):
            if RANK == 0:
                memsaver.trim(wait=True)
                weights[0].fill(77)
            with registered(memsaver.on_resume, fail, on=1):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    error = refused(md.pause, "w")
        assert list(error.failures) == [0] and error.stuck == {} and unchanged() is False
        texts = [str(w.message) for w in caught if w.category is memsaver.MemsaverWarning]
        assert len(texts) == (RANK == 1) and all("not w" in text for text in texts)

        # Ctrl-C in the middle: all is done first. An exit asked for by a callback: nothing is.
        with registered(memsaver.on_pause, lambda tag: signal.raise_signal(signal.SIGINT), on=1):
            if RANK == 1:
                raises(KeyboardInterrupt, md.pause, "w")
            else:
                md.pause("w")
        assert states("w") == ["paused"]
        md.resume("w")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

        def leave(tag):
            sys.exit(3)

        with registered(memsaver.on_pause, leave, on=2):
            error = raises(SystemExit if RANK == 2 else md.RankError, md.pause, "w")
        if RANK == 2:
            error = error.__cause__
        assert error.failures[2].kind == "SystemExit" and states("w") == ["mapped"]

        # paused(): resumes what it paused on each rank, also after an error on one of them.
        if RANK == 0:
            memsaver.pause("kv")
        with contextlib.suppress(ZeroDivisionError):
            with md.paused("w", "kv") as report:
                assert report.local.changed == (("w",) if RANK == 0 else ("w", "kv"))
                assert states("w", "kv") == ["paused"] * 2
                if RANK == 1:
                    1 / 0
        assert states("w", "kv") == ["mapped" if tag == "w" or RANK else "paused" for tag in "wk"]
        assert intact(weights)
        error = raises(md.RankError, md.paused("w", "x").__enter__)
        assert list(error.failures) == [0, 1, 2] and states("w") == ["mapped"]
        if RANK == 0:
            memsaver.resume("kv")
        with registered(memsaver.on_pause, lambda tag: signal.raise_signal(signal.SIGINT), on=1):
            with contextlib.suppress(KeyboardInterrupt):
                with md.paused("w"):
                    assert RANK != 1, "the interrupt comes before the block"
        assert states("w") == ["mapped"] and intact(weights)
        dist.barrier()
        dist.destroy_process_group()
        """,
        3,
    )


def test_a_signal_handler_that_pauses_runs_when_the_call_is_over(run_ranks):
    # A preemption handler, while this rank has begun and waits for a slow one.
    run_ranks(
        """
        begin("gloo")
        (weight,) = blocks("w", [3 * MIB], "host")
        seen = []

        def preempted(number, frame):
            memsaver.pause("w")
            seen.append(states("w"))

        signal.signal(signal.SIGALRM, preempted)
        dist.barrier()

        def begun(tag):
            if RANK == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
            else:
                time.sleep(1)

        registration = memsaver.on_pause(begun)
        md.pause("w")
        registration.remove()
        assert seen == ([] if RANK else [["paused"]])
        md.resume("w")
        # One in a callback, of a call that fails on the other rank.
        def now(tag):
            if RANK:
                raise ValueError()
            registration.remove()
            signal.raise_signal(signal.SIGALRM)

        seen.clear()
        registration = memsaver.on_pause(now)
        error = refused(md.pause, "w")
        registration.remove()
        assert list(error.failures) == [1] and seen == ([] if RANK else [["paused"]])
        memsaver.resume("w")
        assert weight.is_intact() and signal.getsignal(signal.SIGALRM) is preempted
        dist.barrier()
        dist.destroy_process_group()
        """,
        2,
    )


@pytest.mark.long
def test_a_block_that_is_interrupted_everywhere_on_its_way_out(run_ranks):
    # It resumes on all ranks, whichever of them is interrupted.
    run_ranks(
        """
        import itertools, torch
        from interrupter import Interrupter

        begin("gloo")
        (weight,) = blocks("w", [4796], "host")
        interrupter = Interrupter(".") if RANK == 0 else None

        def leave(place):
            with md.paused("w"):
                if interrupter:
                    interrupter.start(place)

        came = torch.ones(1)
        for place in itertools.count(1, 3):
            if interrupter:
                came[0] = interrupter.interrupted(0, lambda: leave(place))
            else:
                leave(place)
            assert states("w") == ["mapped"] and weight.is_intact(), place
            dist.broadcast(came, 0)
            if not came:
                break
        assert place > 300, place
        dist.barrier()
        dist.destroy_process_group()
        """,
        2,
    )


@pytest.mark.long
def test_ranks_that_die_or_hang(run_ranks):
    run_ranks(
        """
        begin("gloo")
        weights, cache = blocks("w", [3 * MIB], "host"), blocks("kv", [MIB])
        groups = [dist.new_group(backend="gloo") for _ in range(3)]

        # One comes late: the others do not wait for it, and it finds nobody.
        if RANK == 2:
            time.sleep(4)
        error = lost(md.pause, "w", "kv", group=groups[0], timeout=1)
        assert error.took < 10 and error.__cause__ is not None and error.status == "GROUP_FAILED"
        assert error.missing == (() if RANK == 2 else (2,)) and "as it was" in str(error)
        assert RANK == 2 or "rank 2 had not come" in str(error)
        assert states("w", "kv") == ["mapped"] * 2 and intact(weights + cache)
        dist.barrier()

        # One hangs in a step: what was begun is given up, what has no backup keeps its bytes.
        with registered(memsaver.on_pause, lambda tag: time.sleep(3), on=1):
            error = lost(md.pause, "w", "kv", group=groups[1], timeout=1)
        assert error.missing == (() if RANK == 1 else (1,))
        assert states("w", "kv") == ["mapped"] * 2 and intact(weights + cache)
        memsaver.pause("w")
        memsaver.resume("w")

        # One dies when it has resumed: the others pause again, with their contents.
        md.pause("w")
        dist.barrier()
        with registered(memsaver.on_resume, lambda tag: os._exit(7), on=2):
            error = lost(md.resume, "w", group=groups[2], timeout=20)
        assert error.took < 10 and error.missing == (2,)
        assert states("w") == ["paused"] and held("w") == 0
        memsaver.resume("w")
        assert intact(weights)
        """,
        3,
        statuses={2: 7},
    )


@pytest.mark.long
def test_a_group_without_a_cpu_backend(run_ranks):
    # As init_process_group("nccl") makes it. torch itself can send no CPU tensor over it.
    run_ranks(
        """
        import torch
        begin("cuda:gloo")
        raises(RuntimeError, dist.all_reduce, torch.zeros(1))
        weights = blocks("w", [3 * MIB], "host")
        md.pause("w")
        with full(on=1):
            error = raises(md.RankError, md.resume, "w")
        assert list(error.failures) == [1] and states("w") == ["paused"]
        torch.set_default_device("meta")  # whatever torch makes tensors on meanwhile
        report = md.resume("w", timeout=10)
        torch.set_default_device("cpu")
        assert report.local.changed == ("w",) and len(report.ranks) == 2
        assert intact(weights)
        other = dist.new_group()
        md.resume("w", group=other, timeout=0.5)  # the connections that this makes are kept
        if RANK == 1:
            time.sleep(2)
        md.resume("w", group=other)
        with md.paused("w", group=other):
            assert states("w") == ["paused"]
        assert intact(weights)
        with memsaver.paused("w"):
            pass
        if RANK == 1:
            os._exit(0)
        error = lost(md.pause, "w", timeout=5)
        assert error.missing == (1,) and intact(weights)
        """,
        2,
    )
