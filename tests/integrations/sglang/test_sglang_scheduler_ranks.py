"""Tests that two ranks or two pipeline stages release and resume together or not at all."""

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


# Only the first stage's replies reach the tokenizer manager.
STAGES = """
    import datetime
    import pytest, torch.distributed as dist
    import fake_sglang
    import memsaver
    from fake_sglang import messages
    from pipeline_stages import StageLoop
    from simulated_driver import Block, Simulator
    from memsaver.integrations.sglang import guard, hooks, pipeline, weight_loads
    from memsaver.integrations.sglang.protocol import IDLE, answers_of
    from scheduler_calls import MIB

    GENERATION = messages.TokenizedGenerateReqInput("a")
    UPDATE = messages.UpdateWeightFromDiskReqInput

    def ask(operation, *others, rid=None, batch=None, tags=None):
        "Send a release or a resume, and further requests; return the answers."
        kind = {"release": fake_sglang.ReleaseMemoryOccupationReqInput,
                "resume": fake_sglang.ResumeMemoryOccupationReqInput}[operation]
        before = len(stage.sent)
        stage.step([kind(tags=tags, rid=rid), *others], batch)
        for _ in range(3):
            stage.step([])
        return answers_of(stage.sent[before:])

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    sim = Simulator()
    sim.start()
    patch = pytest.MonkeyPatch()
    with fake_sglang.modules(patch) as classes:
        hooks.install()
        load = weight_loads.plain_load("UpdateWeightFromDiskReqOutput", has_barrier=False)

        class Stage(StageLoop, classes.Scheduler):
            waiting = ()  # requests; a pipeline runs them even if the generation is paused

            def is_fully_idle(self, ignore_waiting=True):
                return super().is_fully_idle() and (ignore_waiting or not self.waiting)

            def _dispatch(self, request):
                "Load weights as the other handlers about weights do."
                if not isinstance(request, UPDATE):
                    return super()._dispatch(request)
                handler = lambda updater, request: classes.Scheduler._dispatch(self, request)
                return load(handler, self.weight_updater, request)

        Stage.hook()
        stage = Stage(classes.Updater)
        stage.start_loop()
        stage._request_dispatcher = guard.Guard(stage, stage._dispatch)
        with memsaver.region("weights", backup="host"):
            stage.model = Block(sim, 4 * MIB, rank)
        with memsaver.region("kv_cache"):
            kv = Block(sim, 8 * MIB, rank)
        if rank == 0:
            with memsaver.region("cuda_graph", backup="host"):
                graph = Block(sim, 2 * MIB, rank)
        updater = stage.weight_updater
        memsaver_states = lambda: {memsaver.state(tag) for tag in ("kv_cache", "weights")}

        # The last stage is busy: none releases.
        if rank == 1:
            stage.begin("a")
        (answer,) = ask("release")
        assert answer.failure.kind == "EngineBusyError", answer
        assert memsaver_states() == {"mapped"} and not updater.offload_tags
        stage.end("a")

        # A batch stays in the pipeline: none releases. A batch that leaves it is awaited.
        patch.setattr(pipeline, "_ROUNDS", 2)
        stage.step([], batch="a batch")
        stage.step([], batch="a batch")
        (answer,) = ask("release")
        assert answer.failure.kind == "EngineBusyError", answer
        assert "end or abort the requests first" in answer.failure.message, answer
        assert memsaver_states() == {"mapped"} and not updater.offload_tags

        # A resume changes nothing, so it need not wait; after a release that waits, it also waits.
        patch.setattr(pipeline, "_ROUNDS", 1)
        for others in ((), (fake_sglang.ResumeMemoryOccupationReqInput(),)):
            stage.step([], batch="a batch")
            stage.step([], batch="a batch")
            *refused, answer = ask("release" if others else "resume", *others)
            assert answer.operation == "resume" and answer.failure is None, answer
            kinds = [one.failure.kind for one in refused]
            assert kinds == ["EngineBusyError"] * len(others), kinds
            assert memsaver_states() == {"mapped"} and not updater.offload_tags
        patch.setattr(pipeline, "_ROUNDS", 200)
        stage.step([], batch="a batch")
        (answer,) = ask("release")
        assert answer.failure is None and set(answer.released) == set(fake_sglang.TAGS), answer
        assert [report.rank for report in answer.ranks] == [0, 1], answer
        assert len({report.pid for report in answer.ranks}) == 2
        assert memsaver_states() == {"paused"}

        # A pause does not stop the pipeline: requests that wait in it keep the memory.
        assert ask("resume")[0].failure is None
        stage.step([messages.PauseGenerationReqInput()])
        stage.waiting = ("a",)
        (answer,) = ask("release")
        assert answer.failure.kind == "EngineBusyError", answer
        assert memsaver_states() == {"mapped"}
        stage.waiting = ()
        stage.step([messages.ContinueGenerationReqInput()])
        assert ask("release")[0].failure is None

        # An update that arrived with a release is refused, because the release comes first.
        assert ask("resume")[0].failure is None
        (answer,) = ask("release", UPDATE("new"))
        assert answer.failure is None and memsaver_states() == {"paused"}, answer
        reply_kind = messages.UpdateWeightFromDiskReqOutput
        (reply,) = [one for one in stage.sent if isinstance(one, reply_kind)]
        assert not reply.success and "cannot update its weights" in reply.message, reply
        assert stage.death is None

        # A trainer holds the last stage's memory: no stage resumes, and all refuse a generation,
        # which the last one could not run.
        if rank == 1:
            sim.occupy((80 << 30) - sim.physical() - 6 * MIB)
        before = len(stage.handled)
        (answer,) = ask("resume", GENERATION)
        assert answer.failure.kind == "OutOfDeviceMemoryError", answer
        assert "rank 1 of 2" in answer.failure.message and answer.failure.free == 6 * MIB
        assert memsaver_states() == {"paused"} and sim.tag_bytes() == 0
        stage.step([GENERATION])
        kinds = [type(one).__name__ for one in stage.handled[before:]]
        assert "TokenizedGenerateReqInput" not in kinds, kinds
        sim.occupy(0)

        # Only the first stage lacks memory, but both refuse a generation.
        assert ask("resume", tags=["weights", "kv_cache"])[0].failure is None
        assert memsaver_states() == {"mapped"}
        before = len(stage.handled)
        stage.step([GENERATION])
        assert stage.handled[before:] == [], stage.handled[before:]
        assert ask("resume")[0].failure is None
        assert ask("release")[0].failure is None

        # A generation that was paused continues once all stages are awake.
        stage.step([messages.PauseGenerationReqInput()])
        stage.step([messages.ContinueGenerationReqInput()])
        assert stage._engine_paused
        (answer,) = ask("resume")
        assert answer.failure is None and answer.released == (), answer
        assert memsaver_states() == {"mapped"} and stage.model.is_intact() and kv.is_zero()
        assert not stage._engine_paused

        # An idle engine releases its memory in all stages or in none, and sends no reply.
        for is_busy in (True, False):
            if is_busy and rank == 1:
                stage.begin("a")
            assert ask("release", rid=IDLE) == []
            assert memsaver_states() == {"mapped" if is_busy else "paused"}
            stage.end("a")
        (answer,) = ask("resume")
        assert answer.failure is None and stage.model.is_intact(), answer
        stage.end_sends()
        dist.barrier()
    print("done")
"""


@pytest.mark.long
def test_two_ranks_do_it_together_or_not_at_all(tmp_path):
    outputs = rank_processes.run(textwrap.dedent(RANK), 2, tmp_path, timeout=100)
    assert all(output.endswith("done\n") for output in outputs)


def test_two_stages_do_it_together_or_not_at_all(tmp_path):
    outputs = rank_processes.run(textwrap.dedent(STAGES), 2, tmp_path, timeout=100)
    assert all(output.endswith("done\n") for output in outputs)
