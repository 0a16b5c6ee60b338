"""Test that the schedulers of two ranks release and resume together, or not at all."""

from __future__ import annotations

import textwrap

import pytest
import rank_processes

pytest.importorskip("torch")

RANK = """
    import datetime
    import pytest, torch.distributed as dist
    import fake_sglang
    import memsaver
    from simulated_driver import Block, Simulator
    from memsaver.integrations.sglang import hooks
    from scheduler_calls import MIB, ask, states

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    sim = Simulator()
    sim.start()
    patch = pytest.MonkeyPatch()
    with fake_sglang.modules(patch) as classes:
        hooks.install()
        scheduler = classes.Scheduler(classes.Updater, group=dist.group.WORLD)
        with memsaver.region("weights", backup="host"):
            scheduler.model = Block(sim, 4 * MIB, rank)
        with memsaver.region("kv_cache"):
            kv = Block(sim, 8 * MIB, rank)
        updater = scheduler.weight_updater
        everything = ("kv_cache", "weights")
        memsaver_states = lambda: {memsaver.state(tag) for tag in everything}

        # One rank is busy: none releases.
        if rank == 1:
            scheduler.begin("a")
        answer = ask(scheduler, "release")
        assert answer.failure.kind == "EngineBusyError", answer
        assert memsaver_states() == {"mapped"}
        scheduler.end("a")

        # SGLang's part fails on one, before its barrier.
        if rank == 1:
            scheduler.weight_updater.prepare_error = RuntimeError("no room for the buffers")
        answer = ask(scheduler, "release")
        assert "no room for the buffers" in answer.failure.message, answer
        assert memsaver_states() == {"mapped"} and not scheduler.weight_updater.offload_tags
        assert scheduler.model.is_intact() and kv.is_intact()
        assert updater.queue_open  # on the rank that failed, too
        scheduler.weight_updater.prepare_error = None

        # The saver refuses on one: the other one has not given anything up.
        def refuse(tag):
            raise RuntimeError("not now")

        handle = memsaver.on_pause(refuse, "weights") if rank == 1 else None
        answer = ask(scheduler, "release")
        assert "not now" in answer.failure.message and "rank 1 of 2" in answer.failure.message
        assert "with its contents" in answer.failure.message, answer
        assert memsaver_states() == {"mapped"} and kv.is_intact() and scheduler.model.is_intact()
        if handle:
            handle.remove()

        # The saver fails on one.
        if rank == 1:
            sim.fail("cuMemUnmap", 1)
        answer = ask(scheduler, "release")
        assert "rank 1 of 2" in answer.failure.message, answer
        assert "contents of kv_cache without a backup are lost" in answer.failure.message, answer
        assert answer.lost == ("kv_cache",), answer
        assert memsaver_states() == {"mapped"} and not scheduler.weight_updater.offload_tags
        assert scheduler.model.is_intact()

        # All is well.
        answer = ask(scheduler, "release")
        assert answer.failure is None and len(answer.ranks) == 2, answer
        assert [r.rank for r in answer.ranks] == [0, 1] and len({r.pid for r in answer.ranks}) == 2
        assert memsaver_states() == {"paused"}

        # A trainer holds one rank's memory: none resumes.
        if rank == 1:
            sim.occupy((80 << 30) - sim.physical() - 6 * MIB)
        answer = ask(scheduler, "resume")
        assert answer.failure.kind == "OutOfDeviceMemoryError", answer
        assert "rank 1 of 2" in answer.failure.message and answer.failure.free == 6 * MIB
        assert memsaver_states() == {"paused"} and sim.tag_bytes() == 0
        sim.occupy(0)

        # SGLang's part of a resume fails on one, before its barrier or after it.
        for where in ("before weights", "after weights"):
            if rank == 1:
                updater.resume_errors[where] = RuntimeError("another shape")
            answer = ask(scheduler, "resume")
            assert "another shape" in answer.failure.message, answer
            assert "released as before" in answer.failure.message and answer.held == (), answer
            assert memsaver_states() == {"paused"} and updater.offload_tags == set(fake_sglang.TAGS)
            updater.resume_errors.clear()

        # And then another rank cannot give it back: it is named, and a release has it do so.
        if rank == 1:
            sim.occupy((80 << 30) - sim.physical() - 6 * MIB)
        else:
            sim.fail("cuMemUnmap", 1, times=0)
        answer = ask(scheduler, "resume")
        sim.clear_faults()
        assert answer.failure.kind == "OutOfDeviceMemoryError", answer
        assert "release it: rank 0" in answer.failure.message, answer
        assert set(answer.held) == set(fake_sglang.TAGS) == updater.offload_tags
        assert memsaver_states() == ({"mapped"} if rank == 0 else {"paused"})
        answer = ask(scheduler, "release")
        assert answer.failure is None and answer.held == (), answer
        assert [r.bytes > 0 for r in answer.ranks] == [True, False]
        assert memsaver_states() == {"paused"} and sim.tag_bytes() == 0

        sim.occupy(0)
        answer = ask(scheduler, "resume")
        assert answer.failure is None and answer.released == ()
        assert memsaver_states() == {"mapped"} and scheduler.model.is_intact() and kv.is_zero()
        assert scheduler.death is None
        dist.barrier()
    print("done")
"""


@pytest.mark.long
def test_two_ranks_do_it_together_or_not_at_all(tmp_path):
    outputs = rank_processes.run(textwrap.dedent(RANK), 2, tmp_path, timeout=100)
    assert all(output.endswith("done\n") for output in outputs)
