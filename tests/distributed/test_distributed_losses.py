"""Tests ranks that are interrupted, die or hang during a call."""

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.each_python


def test_a_signal_handler_that_pauses_runs_when_the_call_is_over(run_ranks):
    # A preemption handler runs while this rank waits for a slow one.
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
    # The block resumes on all ranks, whichever rank is interrupted.
    run_ranks(
        """
        import itertools, torch
        from interrupter import Interrupter

        begin("gloo")
        (weight,) = blocks("w", [4796], "host")
        interrupter = Interrupter() if RANK == 0 else None

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
        assert error.missing == (() if RANK == 2 else (2,)) and "tags are unchanged" in str(error)
        assert RANK == 2 or "rank 2 had not arrived" in str(error)
        assert states("w", "kv") == ["mapped"] * 2 and intact(weights + cache)
        dist.barrier()

        # One rank hangs in a step: the others undo the call, and lose no contents without a backup.
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
