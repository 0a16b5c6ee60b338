"""Tests colocated sessions on several ranks, with FSDP2 trainers and faults on some ranks."""

import pytest


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_steps_of_ranks_are_bit_equal_to_those_without_sleep(run_colocated, size):
    run_colocated(size)("""
        expected = Trainer("sgd_momentum", model=sharded)
        step(expected)
        plain_engine = TagEngine(expected.model, "plain weights", "plain kv")
        plain = ColocatedSession(plain_engine, expected.model, expected.optimizer, sleep=False)
        for number in range(4):
            with session.rollout() as given:
                held = [row.tag for row in memsaver.stats().tags if row.resident_bytes]
                assert not {"model", "optimizer"} & set(held), held
                mine = given.generate(X)
            assert all(
                row.resident_bytes == 0
                for row in memsaver.stats().tags
                if row.tag in ("model", "optimizer", "weights", "kv_cache")
            )
            with plain.rollout() as given:
                assert torch.equal(given.generate(X), mine)
            with session.training(), plain.training():
                step(trainer)
                step(expected)
                assert trainer.contents() == expected.contents(), number
        for report in session.stages:
            assert [rank.rank for rank in report.ranks] == list(range(SIZE))
            assert all(0 < rank.peak_bytes <= rank.total_bytes for rank in report.ranks)
            assert gathered(report.ranks) == [report.ranks] * SIZE
        assert len(session.stages) > 8
    """)


def test_an_interrupt_of_a_rank_is_an_error_on_the_others_and_never_dropped(run_colocated):
    run_colocated(2)("""
        training()
        before = trainer.contents()
        at = None

        def interrupt(report):
            if RANK == 1 and report.stage is at:
                signal.raise_signal(signal.SIGINT)

        session._on_stage = interrupt

        def ends(call):
            return type(refused(BaseException, call)).__name__

        # At the end of each stage: between it and the next one, or the block.
        stages = {stage: rollout for stage in Stage}
        stages |= {Stage.SLEEP: training, Stage.RESUME_TRAINER: training}
        for at, call in stages.items():
            if at in (Stage.TRAIN, Stage.GENERATE):
                continue  # the last of a call, or followed by one of the same call: below
            session._is_current = False
            expected = ["RankError", "KeyboardInterrupt"]
            assert gathered(ends(call)) == expected, (at, expected)
            assert session.phase is Phase.IDLE
            at = None
            training()
            assert trainer.contents() == before
        # In the block, in its words and out of them.
        def inside(engine):
            if RANK == 1:
                signal.raise_signal(signal.SIGINT)
        assert gathered(ends(lambda: rollout(inside))) == ["RankError", "KeyboardInterrupt"]
        # After an error of the block: both ranks know of the error, and the interrupt is raised.
        at = Stage.TRAIN
        def fail():
            if RANK == 1:
                raise ValueError()
        assert gathered(ends(lambda: training(fail))) == ["RankError", "KeyboardInterrupt"]
        at = None
        rollout()
        training()
        assert trainer.contents() == before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """)


def test_an_interrupt_of_a_rank_in_the_constructor_is_an_error_on_the_others(run_colocated):
    run_colocated(2)("""
        from memsaver.integrations.rollout import session as module

        def interrupted(*given, check=module.check_agreed):
            check(*given)
            if RANK == 1:  # between two collectives
                signal.raise_signal(signal.SIGINT)

        session.close()
        hooks = len(trainer.model._forward_pre_hooks)
        create = lambda: ColocatedSession(engine, trainer.model, trainer.optimizer, timeout=20)
        module.check_agreed, check = interrupted, module.check_agreed
        error = refused(BaseException, create)
        assert type(error) is (KeyboardInterrupt if RANK else RankError), error
        assert RANK or "KeyboardInterrupt" in str(error), error
        assert len(trainer.model._forward_pre_hooks) == hooks
        module.check_agreed = check
        session = create()
        rollout()
        training()
    """)


def test_a_failure_on_one_rank_is_raised_on_all_ranks(run_colocated):
    run_colocated(2)("""
        training()
        before = trainer.contents()
        # Each stage of the engine, on one rank; the kinds are different ones.
        for number, call in enumerate(CALLS):
            guilty = number % SIZE
            if RANK == guilty:
                engine.fail[call] = memsaver.OutOfDeviceMemoryError(f"{call} broke")
            error = refused(memsaver.OutOfDeviceMemoryError, rollout)
            assert list(error.failures) == [guilty] and f"{call} broke" in str(error)
            assert f"rank {guilty} of 2" in str(error)
            assert gathered(str(error)) == [str(error)] * SIZE
            assert (RANK == guilty) == isinstance(
                error.__cause__, memsaver.OutOfDeviceMemoryError
            )
            assert session.phase is Phase.IDLE
            rollout(lambda engine: engine.generate(X))
            training()
            assert trainer.contents() == before, call

        # The same failure on all ranks is raised with its own type.
        engine.fail["wake_up all"] = memsaver.OutOfDeviceMemoryError("no room anywhere")
        error = refused(memsaver.OutOfDeviceMemoryError, rollout)
        assert list(error.failures) == [0, 1] and "ranks 0-1 of 2" in str(error)
        # Differently.
        engine.fail["wake_up all"] = [memsaver.DriverError, memsaver.ConfigError][RANK]("of it own")
        error = refused(RankError, rollout)
        assert [error.failures[r].kind for r in (0, 1)] == ["DriverError", "ConfigError"]
        rollout()

        # No memory for the trainer on one rank: none has it resumed.
        with full(1):
            error = refused(RankError, training)
        assert list(error.failures) == [1] and states("model", "optimizer") == ["paused"] * 2
        training()
        assert trainer.contents() == before

        # No memory for a pause's backup on one rank: all have it mapped.
        if RANK == 0:
            memsaver.trim(wait=True)
            memsaver.configure(fingerprints=False)
            sim.host_limit(0)
        error = refused(RankError, rollout)
        assert list(error.failures) == [0]
        assert error.failures[0].kind == "OutOfHostMemoryError", error
        assert states("model") == ["mapped"]
        sim.host_limit()
        training()
        assert trainer.contents() == before

        # A pause that the driver refuses on one rank: the same.
        with fault("cuMemUnmap", on=0):
            error = refused(RankError, rollout)
        assert list(error.failures) == [0]
        assert states("model") == ["mapped"]
        rollout(lambda engine: engine.generate(X))
        training()

        # One rank's engine dies: the trainer's memory is resumed on all ranks.
        rollout()
        if RANK == 1:
            engine.fail["sleep"] = EngineDiedError("it died")
        training()
        assert "on rank 1 of 2" in next(r.error for r in session.stages[::-1] if r.error)
        assert states("model", "optimizer") == ["mapped"] * 2
        assert trainer.contents() == before

        # An engine that takes all of its time, and fails then.
        def hangs(*_, **named):
            time.sleep(named["timeout"] + 1)
            raise EngineTimeoutError("no answer")

        session._timeout = 2
        works = engine.sleep
        if RANK == 1:
            engine.sleep = hangs
        error = refused(EngineTimeoutError, rollout)
        assert list(error.failures) == [1] and "no answer" in str(error)
        session._timeout, engine.sleep = 20, works
        training()
    """)


def test_an_exception_in_a_block_of_a_rank_is_raised_on_the_others(run_colocated):
    run_colocated(2)("""
        def fails(*_):
            if RANK == 1:
                raise ZeroDivisionError("of rank 1")

        for call, name in ((rollout, "generate"), (training, "train")):
            if RANK == 1:
                assert "of rank 1" in str(refused(ZeroDivisionError, lambda: call(fails)))
            else:
                error = refused(RankError, lambda: call(fails))
                assert list(error.failures) == [1]
                assert "ZeroDivisionError: of rank 1" in str(error)
                assert f"stage {name} failed on rank 1 of 2: " in str(error), error
            assert session.phase is Phase.IDLE
            rollout(lambda engine: engine.generate(X))
            training()
    """)


def test_a_rank_that_dies_or_stays_away_ends_the_wait(run_colocated):
    run_colocated(2, statuses={1: 7})("""
        training()
        before = trainer.contents()
        session._timeout = session._block_timeout = session._trainer._timeout = 10
        if RANK == 1:
            def fall(*_):
                os._exit(7)

            session.engine.update_weights = fall
        began = time.monotonic()
        error = refused(GroupError, rollout)
        assert time.monotonic() - began < 25
        assert "update" in str(error) and error.missing in ((1,), ())
        assert session.phase is Phase.IDLE
        assert states("model") == ["mapped"]
        memsaver.resume()
        assert trainer.contents() == before
        os._exit(0)
    """)
