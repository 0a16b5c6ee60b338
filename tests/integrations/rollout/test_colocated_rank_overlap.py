"""Tests several ranks' colocated sessions whose memory moves while other stages run."""


def test_ranks_overlap_alike_and_share_failures_of_the_background(run_colocated):
    run_colocated(2)("""
        expected = Trainer("sgd_momentum", model=sharded)
        step(expected)
        session.close()
        session = overlapping()
        def cycle(overlaps):
            rollout()
            stages = stages_of(session)
            assert (stages[1] is Stage.RESUME_MODEL) == overlaps, stages
            training(lambda: step(trainer))
            step(expected)
            assert trainer.contents() == expected.contents()

        cycle(False), cycle(False), cycle(True)
        # No room on one rank: no rank overlaps.
        if RANK == 0:
            sim.occupy(memsaver.device_memory(0)[0] - (1 << 29))
        cycle(False)
        sim.occupy(0)
        cycle(True)

        # An update that lacks memory on one rank: all ranks repeat it after the pause.
        for call in ("update_weights", "state"):
            if RANK == 1:
                engine.fail[call] = torch.OutOfMemoryError("CUDA out of memory.")
            rollout()
            stages = stages_of(session)
            assert stages.count(Stage.UPDATE) == 2, (call, stages)
            assert stages.index(Stage.PAUSE_OPTIMIZER) > stages.index(Stage.UPDATE), (call, stages)
            training()
            cycle(False)  # measures the update again

        # A pause that fails on one rank: the states are mapped on all ranks.
        with fault("cuMemUnmap", on=0):
            error = refused(memsaver.DriverError, rollout)
        assert list(error.failures) == [0] and "pause_optimizer" in str(error)
        assert states("optimizer") == ["mapped"]

        # An update that fails on one rank, during a pause that fails on another rank or on none.
        training()
        for call, own, failed in (
            ("wake_up weights", memsaver.DriverError, "DriverError"),
            ("update_weights", memsaver.DriverError, "DriverError"),
            ("update_weights", KeyboardInterrupt, ["RankError", "KeyboardInterrupt"][RANK]),
        ):
            for guilty in (0, None):
                rollout(), training()  # measures the update again
                if RANK == 1:
                    engine.fail[call] = own("lost")
                with fault("cuMemUnmap", on=guilty):
                    error = refused(BaseException, rollout)
                assert type(error).__name__ == failed, error
                assert states("optimizer") == ["paused" if guilty is None else "mapped"]
                assert session.stages[-1].stage is Stage.PAUSE_OPTIMIZER
                notes = "".join(getattr(error, "__notes__", ()))
                assert ("cuMemUnmap" in notes) == (guilty is not None), notes
                rollout(lambda engine: engine.generate(X))
                training()
                assert trainer.contents() == expected.contents()
    """)


def test_a_resume_that_fails_on_one_rank_is_undone_on_all_ranks(run_colocated):
    run_colocated(2)("""
        expected = Trainer("sgd_momentum", model=sharded)
        step(expected)
        session.close()

        def failing(tag):
            if RANK == 1 and tag in failed:
                sim.fail("cuMemCreate", sim.OUT_OF_MEMORY)
            return begin(tag)

        def again():
            if any(p.grad is not None for p in trainer.model.parameters()):
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
                trainer.done += 1
            elif trainer.done < expected.done:
                step(trainer)

        # The states' resume fails in the step of one rank, while the other rank runs its step. By
        # layer, the model's resume fails before the block.
        for by_layer, failed, ended in (
            (False, ["optimizer"], Stage.TRAIN),
            (True, ["optimizer"], Stage.TRAIN),
            (True, ["model", "optimizer"], Stage.RESUME_TRAINER),
        ):
            model = offload(trainer.model, tag="model", by_layer=by_layer)
            session = overlapping(model)
            rollout()
            begin = session._trainer.begin_resume
            session._trainer.begin_resume = failing
            lost = memsaver.OutOfDeviceMemoryError
            error = refused(lost, lambda: training(lambda: step(trainer)))
            assert RANK == 1 or list(error.failures) == [1], error
            del session._trainer.begin_resume
            assert session.stages[-1].stage is ended and session.stages[-1].error
            kept = {"model", "optimizer"} - set(failed)
            assert states(*failed) == ["paused"] * len(failed)
            assert states(*kept) == ["mapped"] * len(kept)
            step(expected)
            training(again)  # runs the step only on the ranks that have not run it
            training()
            assert trainer.contents() == expected.contents(), failed
            rollout(lambda engine: engine.generate(X))
            training()
            session.close()
    """)


def test_an_exception_that_only_one_rank_has_waits_for_no_other_rank(run_colocated):
    run_colocated(2, statuses={1: 7})("""
        session.close()
        session = overlapping()
        before = trainer.contents()

        def after(stage, fail, alone):
            # After the stage has succeeded on all ranks, rank 1 fails. If it leaves alone, rank 0
            # goes on only when rank 1 has left.
            def on_stage(report):
                if report.stage is stage:
                    session._on_stage = None
                    if RANK == 1:
                        fail()
                    elif alone:
                        dist.barrier()
            return on_stage

        def exits():
            raise KeyboardInterrupt  # as at the end of an exchange
        def breaks():
            raise ZeroDivisionError
        def interrupted():
            signal.raise_signal(signal.SIGINT)

        for stage, call, fail, alone in (
            (Stage.RESUME_TRAINER, training, exits, True),
            (Stage.RESUME_TRAINER, training, breaks, True),
            (Stage.RESUME_TRAINER, training, interrupted, False),
            (Stage.TRAIN, training, breaks, True),
            (Stage.WAKE_WEIGHTS, rollout, interrupted, False),
            (Stage.UPDATE, rollout, exits, True),
            (Stage.UPDATE, rollout, breaks, True),
            (Stage.UPDATE, rollout, interrupted, False),
        ):
            for _ in range(2):  # the first update shows how much memory an overlapped one needs
                training(), rollout()
            if call is rollout:
                training()
            case = (RANK, stage, fail)
            session._on_stage = after(stage, fail, alone)
            began = time.monotonic()
            if RANK == 1:
                error = refused((KeyboardInterrupt, ZeroDivisionError), call)
                assert not hasattr(error, "__notes__"), (case, error.__notes__)
            elif stage is Stage.TRAIN:
                call()
            else:
                error = refused(RankError, call)
                assert ("must make the same call" in str(error)) == alone, (case, error)
            assert time.monotonic() - began < 10, case
            if call is rollout:
                assert stages_of(session)[1] is Stage.RESUME_MODEL, case
            if RANK == 1 and alone:
                dist.barrier()
                if stage is not Stage.TRAIN:  # this call meets the other rank's
                    refused(RankError, training)
            session.weights_changed()
            training()
            assert trainer.contents() == before, case

        # The ranks have lost each other: a second call could not succeed.
        rollout()
        session._block_timeout = 5
        error = refused(GroupError, lambda: training(lambda: os._exit(7) if RANK else None))
        assert not hasattr(error, "__notes__"), error.__notes__
        os._exit(0)
    """)


def test_all_ranks_resume_a_model_in_the_background_or_none(run_colocated):
    run_colocated(2)("""
        session.close()
        model = offload(trainer.model, tag="model", by_layer=RANK == 1)
        session = overlapping(model)
        rollout()
        def block():
            assert memsaver.state("model") == "mapped"
            step(trainer)
        training(block)
        rollout()
    """)
