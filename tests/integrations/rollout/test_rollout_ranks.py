"""Tests `RolloutEngine` on the ranks of a group with the fake SGLang.

Importing torch takes seconds in each process, so the same processes run many scenarios.
"""

import pytest
import rollout_ranks


@pytest.fixture
def run_ranks(tmp_path):
    return rollout_ranks.runner(tmp_path)


def test_a_group_of_two_shares_an_engine(run_ranks):
    run_ranks(2)("""
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        manager, target = fake_engine() if RANK == 0 else (None, None)
        engine = RolloutEngine.connect(target, mesh, timeout=20)
        assert (engine.backend is not None) == (RANK == 0) == engine.layout.is_leader
        assert engine.tp_size == 1 and engine.layout.tp_ranks == (0, 1)

        # Each rank has its own back, in order, however many it has.
        mine = [[[10], [20], [30]], [[1000, 1]]][RANK]
        output = engine.generate(mine, {**TWO, "n": RANK + 1}, timeout=20)
        wanted = [[[10, 11], [20, 21], [30, 31]], [[1001, 1002]] * 2][RANK]
        assert rows(output) == wanted
        assert output.prompt_index.tolist() == [[0, 1, 2], [0, 0]][RANK]
        assert rows(engine.generate([[5]] if RANK else [], TWO)) == ([[5, 6]] if RANK else [])
        assert len(engine.generate([])) == 0

        # A bad prompt of one rank is an error of all, and nothing is generated.
        before = manager.schedulers[0].generated if RANK == 0 else None
        error = refused(ConfigError, engine.generate, [[1]] if RANK == 0 else [[]], TWO)
        assert list(error.failures) == [1] and "prompt 0 has no tokens" in str(error)
        assert "generate failed on rank 1 of 2" in str(error)
        assert isinstance(error.__cause__, ConfigError) == (RANK == 1)
        assert RANK or manager.schedulers[0].generated == before
        # Errors of different kinds, and those that are not memsaver's.
        class Odd:
            def __iter__(self):
                raise (OSError if RANK else KeyError)("odd")
        error = refused(md.RankError, engine.generate, Odd(), TWO)
        assert [error.failures[rank].kind for rank in (0, 1)] == ["KeyError", "OSError"]
        # An invalid timeout on one rank.
        error = refused(ConfigError, engine.sleep, timeout=-1 if RANK else 5)
        assert list(error.failures) == [1] and engine.status is Status.AWAKE
        # What the engine refuses.
        error = refused(EngineError, engine.generate, [[1]], {"max_new_tokens": 9000})
        assert "context length" in str(error) and "rank 0 of 2" in str(error)
        # Different calls at once.
        error = refused(md.RankError, engine.sleep if RANK else engine.wake_up)
        assert "same call" in str(error) and "sleep()" in str(error) and "wake_up()" in str(error)
        assert engine.status is Status.UNKNOWN and engine.refresh() is Status.AWAKE

        # Sleep, with what fails.
        report = engine.sleep()
        assert set(report.changed) == engine.released == set(fake_sglang.TAGS)
        assert engine.status is Status.ASLEEP
        error = refused(EngineAsleepError, engine.generate, [[1]], TWO)
        assert error.tag == "cuda_graph" and "wake it up" in str(error)
        refused(ConfigError, engine.wake_up, "optimizer")
        assert engine.status is Status.ASLEEP
        with engine.staged_wake() as reports:
            assert engine.status is Status.WEIGHTS_ONLY
        assert engine.status is Status.AWAKE and len(reports) == 2
        engine.sleep()
        fails_on(1, engine.staged_wake())
        assert engine.status is Status.WEIGHTS_ONLY
        with contextlib.suppress(OSError), engine.asleep():
            assert engine.status is Status.ASLEEP
            if RANK == 1:
                raise OSError
        assert engine.status is Status.WEIGHTS_ONLY
        engine.wake_up()

        # An engine that does not answer in time: of all ranks, when the time is over.
        if RANK == 0:
            manager.generate_seconds = 60
        start = time.monotonic()
        error = refused(EngineTimeoutError, engine.generate, [[1]], TWO, timeout=0.5)
        assert 0.5 <= time.monotonic() - start < 8 and isinstance(error, TimeoutError)
        # A pause by a second thread of each rank ends a generation of the first.
        before = set(manager.schedulers[0].running) if RANK == 0 else None
        generation = Task(engine.generate, [[RANK]], {"max_new_tokens": 6})
        while RANK == 0 and len(manager.schedulers[0].running - before) < 2:
            assert generation.is_alive()
            time.sleep(0.01)
        dist.barrier()
        engine.pause_generation("abort")
        output = generation.result(20)
        assert output.finish_reasons == ("abort",) and rows(output) == [[RANK, RANK + 1, RANK + 2]]
        engine.continue_generation()

        # The leader raises its own interrupt, and the others raise an error.
        if RANK == 0:
            engine.backend.generate = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())
        try:
            engine.generate([[1]])
        except KeyboardInterrupt:
            assert RANK == 0
        except md.RankError as error:
            assert RANK == 1 and "KeyboardInterrupt" in str(error)

        # The engine's scheduler is dead: unknown, on all ranks.
        if RANK == 0:
            fake_sglang.dies_in_a_release(manager)
        error = refused(EngineTimeoutError, engine.sleep, timeout=0.5)
        assert engine.status is Status.UNKNOWN and "rank 0" in str(error)
        engine.close()
        with pytest.raises(InvalidStateError, match="closed"):  # each rank by itself
            engine.sleep()

        # An engine that the leader cannot start.
        def does_not_start(*, tp_size, model_path, **_):
            raise RuntimeError(f"no model {model_path!r} for {tp_size} ranks")
        sys.modules["sglang"].Engine = does_not_start
        error = refused(EngineError, RolloutEngine.launch, mesh, model_path="m", timeout=20)
        assert "no model 'm' for 2 ranks" in str(error) and "rank 0 of 2" in str(error)

        # A leader without an engine, and a server that is not there.
        error = refused(ConfigError, RolloutEngine.connect, None, mesh, timeout=20)
        assert "must be an sglang.Engine" in str(error)
        error = refused(EngineError, RolloutEngine.connect, "http://127.0.0.1:9", mesh, timeout=20)
        assert "cannot be reached" in str(error) and "rank 0 of 2" in str(error)
    """)


def test_ranks_that_die_or_hang(run_ranks):
    run_ranks(3, statuses={1: 7})("""
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        def connected(timeout):
            _, target = fake_engine() if RANK == 0 else (None, None)
            return RolloutEngine.connect(target, mesh, timeout=timeout)

        # One that does not come: an error on the others when the engine's time is over.
        engine = connected(20)
        engine.together._timeout = 3
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        if RANK == 2:
            store.wait(["missed0", "missed1"], datetime.timedelta(seconds=60))
        else:
            error = lost(engine.sleep)
            store.set(f"missed{RANK}", "")
            assert error.missing == (2,) and 3 <= error.took < 15 and "sleep()" in str(error)
            assert engine.status is Status.UNKNOWN
        dist.barrier()
        # The process group is as it was, and so is what is made for it anew.
        engine = connected(20)
        assert rows(engine.generate([[RANK]], TWO)) == [[RANK, RANK + 1]]
        # One that dies while the leader works: the leader may end, and the next call fails.
        if RANK == 1:
            os._exit(7)
        for _ in range(2):
            try:
                engine.generate([[RANK]], TWO)
            except md.GroupError as error:
                assert error.missing in ((1,), ()), error
                break
        else:
            raise AssertionError("nobody missed rank 1")
        os._exit(0)
    """)


@pytest.mark.long
def test_a_leader_that_dies_at_work(run_ranks):
    run_ranks(2, statuses={0: 9})("""
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        manager, target = fake_engine() if RANK == 0 else (None, None)
        engine = RolloutEngine.connect(target, mesh, timeout=60)
        if RANK == 0:
            threading.Timer(1, lambda: os._exit(9)).start()
            manager.generate_seconds = 60
            engine.generate([[1]])
        error = lost(engine.generate, [[1]])
        assert error.took < 30 and "generate" in str(error)
        os._exit(0)
    """)


def test_two_groups_of_two_have_their_own_engines(run_ranks):
    run_ranks(4)("""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        manager, target = fake_engine() if RANK % 2 == 0 else (None, None)
        engine = RolloutEngine.connect(target, mesh, timeout=20)
        layout = engine.layout
        assert (layout.dp_rank, layout.dp_size) == (RANK // 2, 2)
        assert layout.tp_ranks == ((0, 1), (2, 3))[RANK // 2] and layout.tp_rank == RANK % 2
        assert layout.leader == RANK // 2 * 2
        assert rows(engine.generate([[100 * RANK]], TWO)) == [[100 * RANK, 100 * RANK + 1]]

        # Groups do not wait for each other, unless they are asked to.
        if RANK < 2:
            engine.sleep("kv_cache")
            engine.wake_up()
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        if RANK >= 2:
            time.sleep(0.5)
            store.add(f"comes{RANK}", 1)  # `set` would return before the store has the key
        engine.sleep(fence=True)
        assert store.check(["comes2", "comes3"])
        engine.wake_up(fence=True)

        # A failure of one engine is an error on the ranks of all engines.
        if RANK == 2:
            fake_sglang.dies_in_a_release(manager)
        error = refused(EngineTimeoutError, engine.sleep, fence=True, timeout=1)
        assert list(error.failures) == [2] and "rank 2 of 4" in str(error)
        assert engine.status is (Status.ASLEEP if RANK < 2 else Status.UNKNOWN)
        if RANK < 2:
            engine.wake_up()
        dist.barrier()

        # A new engine; a block that fails on one rank of a fence.
        if RANK == 2:
            manager, target = fake_engine()
        engine = RolloutEngine.connect(target, mesh, timeout=20)
        engine.sleep()
        fails_on(3, engine.staged_wake(fence=True))
        assert engine.status is Status.WEIGHTS_ONLY
        engine.wake_up()

        # Other meshes: dimensions by other names, several of them, and none for tp.
        both = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "model"))
        other = RolloutEngine.connect(
            target, both, tp="model", dp=("replicate", "shard"), timeout=20
        )
        assert other.layout.dp_rank == RANK // 2 and other.layout.tp_ranks == layout.tp_ranks
        other.sleep("kv_cache", fence=True)
        other.wake_up(fence=True)
        _, own = fake_engine()
        alone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        each = RolloutEngine.connect(own, alone, timeout=20)
        assert each.layout.is_leader and each.layout.dp_rank == RANK
        assert rows(each.generate([[RANK]], TWO)) == [[RANK, RANK + 1]]
        for bad in (dict(tp="model"), dict(dp="replicate")):
            with pytest.raises(ConfigError, match="dimensions are 'replicate', 'shard', 'model'"):
                RolloutEngine.connect(target, both, **bad)

        # A server for each group, by URL.
        urls = gathered(fake_sglang.Server(manager).url if manager else "")
        servers = RolloutEngine.connect([urls[0], urls[2]], mesh, timeout=20)
        assert rows(servers.generate([[RANK + 7]], TWO)) == [[RANK + 7, RANK + 8]]
        dist.barrier()  # rank 0 hosts the store
        os._exit(0)  # ends the servers' threads
    """)
