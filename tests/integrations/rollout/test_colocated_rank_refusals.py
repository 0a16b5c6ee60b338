"""Tests that the ranks of a colocated session refuse arguments and calls that differ between
them.
"""


def test_arguments_of_a_session_that_differ_between_ranks_are_an_error_on_all(run_colocated):
    run_colocated(2)("""
        class Collective(TagEngine):
            def update_weights(self, state, scale=1.0):
                dist.barrier()  # as a RolloutEngine, whose ranks wait for each other
                return super().update_weights(state, scale)

        session.close()
        for tag in ("first", "second"):
            with memsaver.region(tag, backup="host"):
                pass
        engine = Collective(trainer.model, "other weights", "other kv_cache")
        for name, *values in (
            ("sleep", True, False),
            ("overlap", True, False),
            ("whole_updates", False, True),
            ("engine_keeps_weights", False, True),
            ("tags", ("first",), ("first", "second")),
        ):
            options = {name: values[RANK]}
            error = refused(
                memsaver.ConfigError,
                lambda: ColocatedSession(engine, plain_model(), timeout=20, **options),
            )
            assert f"{name} must be equal on all ranks" in str(error), error
            assert "on rank 0" in str(error) and "on rank 1" in str(error), error

        # The functions that return the weights and the options, before a rank waits in the engine.
        class Broken(Exception):
            pass

        def state():
            if broken == "state" and RANK == 1:
                raise Broken("no weights")
            return trainer.model.state_dict()

        def options():
            if broken == "options" and RANK == 0:
                raise Broken("no options")
            return [("scale", 1.0)] if broken == "pairs" and RANK == 1 else {"scale": 1.0}

        session = ColocatedSession(
            engine, trainer.model, state=state, update_options=options, sleep=False, timeout=20
        )
        for broken, kind, text in (
            ("state", RankError, "Broken: no weights"),
            ("options", RankError, "Broken: no options"),
            ("pairs", memsaver.ConfigError, "update_options must be a mapping"),
        ):
            started = time.monotonic()
            error = refused(kind, rollout)
            assert text in str(error) and time.monotonic() - started < 10, error
        broken = ""
        rollout()
    """)


def test_a_bad_argument_of_a_rank_is_an_error_on_all_ranks_at_once(run_colocated):
    run_colocated(2)("""
        class Odd:
            __repr__ = __eq__ = __hash__ = __lt__ = __bool__ = lambda self, *_: 1 / 0

        everyone = dist.new_group()
        closed = dist.new_group()
        dist.destroy_process_group(closed)
        hooks = len(trainer.model._forward_pre_hooks)
        config, state, key = "ConfigError", "InvalidStateError", "UnknownTagError"
        start = time.monotonic()
        for bad, kind in (
            ({"backup": "none"}, config),
            ({"backup": Odd()}, None),
            ({"state": 5}, config),
            ({"engine": object()}, config),
            ({"model": object()}, config),
            ({"optimizer": object()}, config),
            ({"on_stage": 5}, config),
            ({"timeout": 10**400}, config),
            ({"block_timeout": Odd()}, config),
            ({"sleep": Odd()}, "ZeroDivisionError"),
            ({"engine_keeps_weights": Odd()}, "ZeroDivisionError"),
            ({"update_options": 5}, config),
            ({"tags": ["never seen"]}, key),
            ({"group": "everyone"}, config),
            ({"group": Odd()}, config),
            ({"group": closed}, state),
        ):
            for group in (None, everyone):
                given = {
                    "engine": engine,
                    "model": trainer.model,
                    "optimizer": trainer.optimizer,
                    "group": group,
                    "timeout": 40,
                    **(bad if RANK == 1 else {}),
                }
                error = refused(memsaver.MemsaverError, lambda: ColocatedSession(**given))
                assert list(error.failures) == [1], (bad.keys(), error)
                assert kind in (None, error.failures[1].kind), error
                assert gathered(str(error)) == [str(error)] * SIZE
                assert len(trainer.model._forward_pre_hooks) == hooks, bad.keys()
        assert time.monotonic() - start < 35, "no wait lasted until a timeout"
        rollout(lambda engine: engine.generate(X))
        training()
    """)


def test_ranks_that_call_different_things_are_refused_before_anything_is_done(run_colocated):
    run_colocated(2)("""
        training()
        before, heard = trainer.contents(), list(engine.heard)
        error = refused(RankError, rollout if RANK == 0 else training)
        assert "same call" in str(error)
        assert gathered(str(error)) == [str(error)] * SIZE
        assert engine.heard == heard and session.phase is Phase.IDLE

        # So are ranks that know other things of the engine's weights.
        session._keeps = True
        rollout()
        training()
        rollout()
        if RANK == 1:
            session.weights_changed()
        assert "same call" in str(refused(RankError, rollout))
        session.weights_changed()
        rollout()

        # And all ranks that nest blocks.
        def nested():
            with session.training():
                rollout()

        assert "inside a training" in str(refused(memsaver.InvalidStateError, nested))
        rollout()
        training()
        assert trainer.contents() == before
    """)
