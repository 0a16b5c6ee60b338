"""Tests that all ranks of a mesh raise in the same call if some ranks' arguments are invalid."""

import pytest
import rollout_ranks


@pytest.fixture
def run_ranks(tmp_path):
    return rollout_ranks.runner(tmp_path)


def test_a_bad_argument_of_a_rank_is_an_error_on_all_ranks_of_the_mesh(run_ranks):
    run_ranks(4)("""
        from memsaver.integrations.rollout.weights import WeightGroup

        class Odd:
            __repr__ = __eq__ = __hash__ = __lt__ = __iter__ = lambda self, *_: 1 / 0

        start = time.monotonic()
        _, target = fake_engine()
        for sizes, names, options in (
            ((2, 2), ("dp", "tp"), {}),
            ((4,), ("dp",), {}),
            ((4,), ("tp",), {}),
            ((2, 2, 1), ("a", "b", "tp"), {"dp": ("a", "b")}),
        ):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            for bad in (
                {"mesh": "dp"},
                {"mesh": Odd()},
                {"tp": 5, "dp": 7},
                {"dp": Odd()},
                {"timeout": -1},
                {"timeout": Odd()},
            ):
                given = {"mesh": mesh, **options, "timeout": 40, **(bad if RANK == 1 else {})}
                with pytest.raises(MemsaverError) as caught:
                    RolloutEngine.connect(target, **given)
                assert not isinstance(caught.value, md.GroupError), caught
                assert RANK != 1 or "rank 1" in str(caught.value), caught
            engine = RolloutEngine.connect(target, mesh, timeout=40, **options)
            assert rows(engine.generate([[RANK]], TWO)) == [[RANK, RANK + 1]]
            engine.sleep(fence=True)
            engine.wake_up(fence=True)
            # Tags of one rank that are no tags; the engine's are those of the leader.
            alone = engine.layout.tp_size == 1
            if 1 in engine.layout.tp_ranks:
                for odd in (5, [["weights"]], *(() if alone else ([Odd()], Odd()))):
                    for call in (engine.sleep, engine.wake_up):
                        with pytest.raises(MemsaverError) as caught:
                            call(odd if RANK == 1 else None, timeout=5)
                        assert caught.type is (ConfigError if alone else md.RankError), caught
                        assert engine.refresh() is Status.AWAKE
            for bad in ({"backend": "mpi"}, {"timeout": "soon"}, {"timeout": Odd()}):
                given = {"backend": "gloo", "timeout": 20, **(bad if RANK == 1 else {})}
                with pytest.raises(ConfigError, match="backend must be one of|positive number"):
                    WeightGroup(engine, **given)
            engine.close()
        # A rank that is not in its mesh keeps nobody waiting, and does not wait.
        from torch.distributed.device_mesh import DeviceMesh
        part = DeviceMesh("cpu", [0, 2], mesh_dim_names=("dp",))
        if RANK in (0, 2):
            RolloutEngine.connect(target, part, timeout=40).close()
        else:
            with pytest.raises(ConfigError, match="not in the mesh"):
                RolloutEngine.connect(target, part, timeout=40)
        # On all ranks.
        assert [*refused(ConfigError, RolloutEngine.connect, target, "dp").failures] == [0, 1, 2, 3]
        assert time.monotonic() - start < 35, "no wait lasted until a timeout"
        dist.barrier()
    """)


def test_an_invalid_mesh_is_an_error_on_all_ranks_even_if_some_are_slow(run_ranks):
    run_ranks(6)("""
        _, target = fake_engine()
        both = {"dp": ("a", "b")}
        one_slow = ((1,), (3,)), ((1,), (0,)), ((1, 2), (0,)), ((1, 3), (0,)), ((0, 1, 3), (2,))
        for sizes, names, options, cases in (
            ((2, 2), ("dp", "tp"), {}, one_slow),
            # The groups of this mesh have the same ranks as those of the first one.
            ((2, 2), ("a", "b"), both, one_slow),
            ((3, 2), ("dp", "tp"), {}, (((0, 5), (1, 4)), ((3,), (1, 2)))),
            ((6,), ("tp",), {}, (((1,), (0,)), ((1, 2), (5,)))),
        ):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            for bad, slow in cases if RANK in mesh.mesh else ():
                start = time.monotonic()
                given = {"mesh": "dp" if RANK in bad else mesh, "timeout": 40, **options}
                time.sleep((0.6 if RANK in slow else 0) + (0.2 if RANK in bad else 0))
                with pytest.raises(ConfigError, match="mesh must be a DeviceMesh"):
                    RolloutEngine.connect(target, **given)
                assert time.monotonic() - start < 12, (names, bad, slow)
                RolloutEngine.connect(target, mesh, timeout=40, **options).close()
        dist.barrier()
    """)


def test_a_rank_with_an_invalid_mesh_reports_it_to_all_even_if_a_rank_is_interrupted(run_ranks):
    run_ranks(4)("""
        _, target = fake_engine()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        start = time.monotonic()
        if RANK == 0:  # while it waits for rank 1
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        time.sleep({1: 0.8, 3: 1.6}.get(RANK, 0))
        kinds = (KeyboardInterrupt,) if RANK == 0 else (md.RankError, ConfigError)
        with pytest.raises(kinds):
            RolloutEngine.connect(target, "dp" if RANK == 1 else mesh, timeout=40)
        assert time.monotonic() - start < 12
        RolloutEngine.connect(target, mesh, timeout=40).close()
        dist.barrier()
    """)


def test_each_rank_gets_its_samples_from_a_mesh_whose_ranks_are_in_any_order(run_ranks):
    run_ranks(4)("""
        from torch.distributed.device_mesh import DeviceMesh

        _, target = fake_engine()
        for order in ([[3, 1], [2, 0]], [[1, 0], [3, 2]]):
            mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp"))
            engine = RolloutEngine.connect(target, mesh, timeout=40)
            layout = engine.layout
            assert layout.tp_ranks[layout.tp_rank] == RANK
            assert layout.is_leader == (layout.tp_ranks[0] == RANK)
            assert rows(engine.generate([[100 * RANK]], TWO)) == [[100 * RANK, 100 * RANK + 1]]
            engine.close()
    """)


def test_an_invalid_mesh_is_an_error_at_once_if_another_mesh_has_a_group_of_the_same_ranks(
    run_ranks,
):
    run_ranks(4)("""
        from torch.distributed.device_mesh import DeviceMesh

        _, target = fake_engine()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        DeviceMesh("cpu", [0, 2], mesh_dim_names=("dp",))
        for invalid, slow in ((0, 3), (2, 1), (3, 0)):
            dist.barrier()
            time.sleep(0.6 if RANK == slow else 0.2 if RANK == invalid else 0)
            error = refusals.refused(
                MemsaverError,
                RolloutEngine.connect,
                target,
                "dp" if RANK == invalid else mesh,
                timeout=40,
            )
            assert not isinstance(error, md.GroupError), error
            RolloutEngine.connect(target, mesh, timeout=40).close()
    """)


def test_calls_succeed_after_ranks_have_given_up_waiting_for_one_another(run_ranks):
    """A rank with an invalid mesh stops waiting before the other ranks call; later, a rank skips a
    call."""
    run_ranks(2)("""
        _, target = fake_engine()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        for late, bad in ((0, 1), (1, None)):
            dist.barrier()
            if RANK == late:
                time.sleep(4)
            given = "dp" if RANK == bad else mesh
            with pytest.raises(MemsaverError):
                RolloutEngine.connect(target, given, timeout=1).close()
            dist.barrier()
            for _ in range(2):
                engine = RolloutEngine.connect(target, mesh, timeout=40)
                assert rows(engine.generate([[RANK]], TWO)) == [[RANK, RANK + 1]]
                engine.close()
    """)


def test_an_interrupt_ends_the_search_of_a_rank_with_an_invalid_mesh(run_ranks):
    """No other rank calls.

    Without the interrupt, the search would outlast the time limit of the ranks' processes.
    """
    run_ranks(2)("""
        import os
        import signal

        _, target = fake_engine()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        if RANK == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                RolloutEngine.connect(target, "dp", timeout=300)
        dist.barrier()
        RolloutEngine.connect(target, mesh, timeout=40).close()
        # The rank no longer counts as waiting: another one's search fails.
        if RANK == 0:
            with pytest.raises(md.GroupError, match="no other rank waited"):
                RolloutEngine.connect(target, "dp", timeout=1)
        dist.barrier()
    """)
