"""`RolloutEngine` on one process and on the ranks of a group, over the stand-in for SGLang.

Importing torch takes seconds in each process, so a set of processes goes through many scenes.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap

import pytest
import rank_processes
import sglang_stand_in as stand_in
from tasks import Task

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.rollout import RolloutEngine
from memsaver.integrations.sglang.errors import EngineError, EngineTimeoutError
from memsaver.integrations.sglang.status import Status

torch = pytest.importorskip("torch")

TWO = {"max_new_tokens": 2}


# --- one process ----------------------------------------------------------------------------------


@pytest.fixture
def make_engine(monkeypatch):
    """`make_engine("local" | "server")` is a rollout engine, and its stand-in's manager."""
    with contextlib.ExitStack() as cleanup:

        def make(kind: str = "local", **options):
            classes = cleanup.enter_context(stand_in.modules(monkeypatch))
            manager = classes.Tokenizer([classes.Scheduler(classes.Updater)])
            engine = (stand_in.Engine if kind == "local" else stand_in.Server)(manager)
            cleanup.callback(engine.shutdown)
            target = engine if kind == "local" else engine.url
            return RolloutEngine.connect(target, timeout=30, **options), manager

        yield make


def rows(output):
    """The samples' tokens, without padding."""
    return [
        row[mask.bool()].tolist()
        for row, mask in zip(output.token_ids, output.attention_mask, strict=True)
    ]


@pytest.mark.parametrize("kind", ["local", "server"])
def test_what_a_rollout_gives(make_engine, kind):
    engine, _ = make_engine(kind, pad_token_id=-7)
    params = [{"max_new_tokens": 3}, {"max_new_tokens": 1}, {"max_new_tokens": 0}]
    output = engine.generate([[10, 20], [4], [5]], params)
    assert output.token_ids.tolist() == [[30, 31, 32], [4, -7, -7], [-7, -7, -7]]
    assert output.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert output.lengths.tolist() == [3, 1, 0] and output.prompt_index.tolist() == [0, 1, 2]
    expected = torch.tensor([[-0.030, -0.031, -0.032], [-0.004, 0, 0], [0, 0, 0]])
    assert torch.equal(output.logprobs, expected)
    kinds = (output.token_ids, output.attention_mask, output.lengths, output.prompt_index)
    assert {tensor.dtype for tensor in kinds} == {torch.int64}
    assert output.logprobs.dtype is torch.float32 and len(output) == 3
    assert output.finish_reasons == ("length",) * 3 and output.weight_version == "default"
    nothing = engine.generate([])
    assert len(nothing) == 0 and nothing.token_ids.shape == (0, 0)


def test_samples_of_a_prompt_stand_together(make_engine):
    engine, _ = make_engine()
    params = [{**TWO, "n": 3, "sampling_seed": 5}, TWO, {**TWO, "n": 2}]
    output = engine.generate([[100], [200], [300]], params)
    assert output.prompt_index.tolist() == [0, 0, 0, 1, 2, 2]
    firsts = [100 + 7 * 5, 100 + 7 * 6, 100 + 7 * 7, 200, 300, 300]
    assert rows(output) == [[first, first + 1] for first in firsts]


def test_prompts_of_any_kind(make_engine):
    engine, _ = make_engine()
    wanted = [[6, 7], [9, 10]]
    lists = [[1, 2, 3], [4, 5]]
    assert rows(engine.generate(lists, TWO)) == wanted
    assert rows(engine.generate(tuple(map(tuple, lists)), TWO)) == wanted
    assert rows(engine.generate([torch.tensor(one) for one in lists], TWO)) == wanted
    for side in ([[1, 2, 3], [0, 4, 5]], [[1, 2, 3], [4, 5, 0]]):
        tensor = torch.tensor(side)
        assert rows(engine.generate(tensor, TWO, attention_mask=tensor != 0)) == wanted
    assert rows(engine.generate(torch.tensor([[1], [2]]), TWO)) == [[1, 2], [2, 3]]
    images = [{"image_data": ["a.png"]}, None]
    assert rows(engine.generate(lists, TWO, multimodal=images))[0][0] == 106


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([1, 2, 3],), "list of prompts"),
        (([[1], []],), "prompt 1 has no tokens"),
        (([[1, -4]],), "-4"),
        (([[1, 2.5]],), "2.5"),
        (([[True]],), "True"),
        ((7,), "list of prompts"),
        ((torch.tensor([1, 2]),), "2 dimensions"),
        ((torch.tensor([[1.0]]),), "1.0"),
        (([[1]], [TWO, TWO]), "one for each of 1"),
        (([[1]], {"n": 0}), "not 0"),
        (([[1]], ["n"]), "sampling_params"),
        (([[1]], 5), "sampling_params"),
    ],
)
def test_prompts_that_are_none(make_engine, arguments, match):
    engine, manager = make_engine()
    with pytest.raises(ConfigError, match=match):
        engine.generate(*arguments)
    with pytest.raises(ConfigError, match="shape"):
        engine.generate(torch.ones(2, 3, dtype=int), attention_mask=torch.ones(2, 2))
    with pytest.raises(ConfigError, match="padded tensor"):
        engine.generate([[1]], attention_mask=torch.ones(1, 1))
    with pytest.raises(ConfigError, match="not list"):
        engine.generate(torch.ones(1, 2, dtype=int), attention_mask=[[1, 0]])
    for multimodal in ([None, None], [5], 5):
        with pytest.raises(ConfigError, match="multimodal"):
            engine.generate([[1]], multimodal=multimodal)
    assert manager.schedulers[0].generated == 0


@pytest.mark.parametrize("kind", ["local", "server"])
def test_sleep_and_wake_up(make_engine, kind):
    engine, manager = make_engine(kind)
    released = manager.schedulers[0].weight_updater.offload_tags
    assert engine.status is Status.AWAKE and engine.released == frozenset()
    assert engine.sleep(["kv_cache"]).changed == ("kv_cache",)
    assert engine.status is Status.WEIGHTS_ONLY and released == {"kv_cache"}
    engine.check("update_weights")
    with pytest.raises(InvalidStateError, match="kv_cache"):
        engine.check("generate")
    with pytest.raises(InvalidStateError, match="kv_cache"):
        engine.generate([[1]])
    with pytest.raises(ConfigError, match="optimizer"):
        engine.wake_up("optimizer")
    assert engine.status is Status.WEIGHTS_ONLY
    assert engine.wake_up().changed == ("kv_cache",) and released == set()
    with engine.asleep() as report:
        assert set(report.changed) == released == set(stand_in.TAGS)
    assert engine.status is Status.AWAKE and released == set()
    engine.sleep()
    with engine.staged_wake() as reports:
        assert engine.status is Status.WEIGHTS_ONLY and reports[0].changed == ("weights",)
    assert reports[1].changed == ("cuda_graph", "kv_cache") and released == set()
    with pytest.raises(OSError), engine.asleep():
        raise OSError
    assert engine.status is Status.AWAKE
    engine.sleep()
    with pytest.raises(OSError), engine.staged_wake():
        raise OSError
    assert engine.status is Status.WEIGHTS_ONLY
    engine.wake_up()
    assert rows(engine.generate([[1]], TWO)) == [[1, 2]]


def test_others_may_have_changed_it(make_engine):
    engine, manager = make_engine(kind="server")
    engine.backend.control.sleep("weights")
    assert engine.status is Status.AWAKE and engine.refresh() is Status.NO_WEIGHTS
    engine.wake_up()
    stand_in.dies_in_a_release(manager)
    with pytest.raises(EngineTimeoutError):
        engine.sleep(timeout=0.2)
    assert engine.status is Status.UNKNOWN
    with pytest.raises(InvalidStateError, match="unknown"):
        engine.check("generate")


def test_a_generation_is_aborted_by_a_pause_of_another_thread(make_engine):
    engine, manager = make_engine()
    manager.generate_seconds = 60
    generation = Task(engine.generate, [[1], [2]], {"max_new_tokens": 8})
    while not manager.schedulers[0].running:
        assert generation.is_alive()
    engine.pause_generation()
    output = generation.result(30)
    assert output.finish_reasons == ("abort", "abort") and output.lengths.tolist() == [4, 4]
    engine.continue_generation()
    manager.generate_seconds = 0
    assert len(engine.generate([[1]], TWO)) == 1


def test_a_version_that_changes_among_samples_is_none(make_engine):
    engine, _ = make_engine()
    samples = engine.backend.generate
    engine.backend.generate = lambda requests, timeout: [
        type(sample)(sample.token_ids, None, sample.finish_reason, str(number))
        for number, sample in enumerate(samples(requests, timeout))
    ]
    output = engine.generate([[1], [2]], TWO)
    assert output.weight_version is None and output.logprobs is None


def test_an_engine_that_gives_other_samples_than_asked_for(make_engine, monkeypatch):
    engine, _ = make_engine()
    given = engine.backend.generate
    for change in (lambda samples: samples[1:], lambda samples: samples * 2):
        monkeypatch.setattr(engine.backend, "generate", lambda *args, do=change: do(given(*args)))
        with pytest.raises(EngineError, match=r"gave [14] samples for 2 requests"):
            engine.generate([[1], [2]], TWO)


def test_a_closed_engine(make_engine):
    engine, manager = make_engine()
    with engine:
        assert "awake" in repr(engine) and "rank 0 of 1" in repr(engine)
    engine.close()
    assert "closed" in repr(engine)
    for call in (lambda: engine.generate([[1]]), engine.sleep, engine.pause_generation):
        with pytest.raises(InvalidStateError, match="closed"):
            call()
    assert manager.pause_mode == "" and not manager.schedulers[0].weight_updater.offload_tags


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "soon"])
def test_times_that_are_none(make_engine, timeout):
    engine, _ = make_engine()
    for call in (
        lambda: engine.generate([[1]], timeout=timeout),
        lambda: engine.sleep(timeout=timeout),
        lambda: engine.pause_generation(timeout=timeout),
        lambda: RolloutEngine.connect("http://127.0.0.1:9", timeout=timeout),
    ):
        with pytest.raises(ConfigError, match="positive number of seconds"):
            call()
    assert engine.status is Status.AWAKE


def test_what_cannot_be_connected_to(make_engine):
    with pytest.raises(ConfigError, match="DeviceMesh"):
        RolloutEngine.connect("http://127.0.0.1:9", mesh="dp")
    with pytest.raises(EngineError, match="cannot be reached"):
        RolloutEngine.connect("http://127.0.0.1:9", timeout=2)
    with pytest.raises(ConfigError, match="2 servers for 1"):
        RolloutEngine.connect(["http://a", "http://b"], timeout=2)


def test_importing_it_imports_neither_torch_nor_an_engine():
    code = """
        import sys
        import memsaver.integrations.rollout as rollout
        rollout.RolloutEngine, rollout.RolloutOutput, rollout.Request
        assert not {"torch", "sglang"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


# --- several ranks --------------------------------------------------------------------------------

PRELUDE = """
import contextlib, datetime, os, sys, threading, time
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import memsaver
import memsaver.distributed as md
import sglang_stand_in as stand_in
from memsaver.errors import *
from memsaver.integrations.rollout import RolloutEngine
from memsaver.integrations.sglang import EngineBusyError, EngineError, EngineTimeoutError, Status
from tasks import Task

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
TWO = {"max_new_tokens": 2}
classes = contextlib.ExitStack().enter_context(kept := stand_in.modules(pytest.MonkeyPatch()))

def stand_in_engine():
    manager = classes.Tokenizer([classes.Scheduler(classes.Updater)])
    return manager, stand_in.Engine(manager)

def rows(output):
    return [row[:length].tolist() for row, length in zip(output.token_ids, output.lengths)]

def gathered(value):
    everyones = [None] * SIZE
    dist.all_gather_object(everyones, value)
    return everyones

def refused(kind, call, *arguments, **named):
    # The error, which must be the same on all ranks.
    try:
        call(*arguments, **named)
    except MemsaverError as error:
        assert type(error) is kind, repr(error)
        same = gathered((str(error), error.failures, error.tag, error.status))
        assert all(other == same[0] for other in same), same
        return error
    raise AssertionError("nothing failed")

def lost(call, *arguments, **named):
    start = time.monotonic()
    try:
        call(*arguments, **named)
    except md.GroupError as error:
        error.took = time.monotonic() - start
        return error
    raise AssertionError("the group was not lost")
"""


@pytest.fixture
def run_ranks(tmp_path):
    """Runs code in as many processes as a mesh has ranks: `run_ranks(code, 4)`."""

    def run(code, size, statuses=None):
        text = PRELUDE + textwrap.dedent(code)
        rank_processes.run(text, size, tmp_path, statuses=statuses, timeout=90)

    return run


@pytest.mark.timeout(180)
def test_a_group_of_two_shares_an_engine(run_ranks):
    run_ranks(
        """
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        manager, target = stand_in_engine() if RANK == 0 else (None, None)
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
        # A time of one rank that is none.
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
        assert set(report.changed) == engine.released == set(stand_in.TAGS)
        assert engine.status is Status.ASLEEP
        error = refused(InvalidStateError, engine.generate, [[1]], TWO)
        assert error.tag == "cuda_graph" and "wake it up" in str(error)
        refused(ConfigError, engine.wake_up, "optimizer")
        assert engine.status is Status.ASLEEP
        with engine.staged_wake() as reports:
            assert engine.status is Status.WEIGHTS_ONLY
        assert engine.status is Status.AWAKE and len(reports) == 2
        engine.sleep()
        try:
            with engine.staged_wake():
                if RANK == 1:
                    raise OSError("no update")
        except OSError:
            assert RANK == 1
        except md.RankError as error:
            assert RANK == 0 and "rank 1 of 2" in str(error) and "no update" in str(error)
        else:
            raise AssertionError
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

        # An interrupt of the leader's is its own; the others hear of it.
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
            stand_in.dies_in_a_release(manager)
        error = refused(EngineTimeoutError, engine.sleep, timeout=0.5)
        assert engine.status is Status.UNKNOWN and "rank 0" in str(error)
        engine.close()
        refused(InvalidStateError, engine.sleep)

        # An engine that the leader cannot start.
        def does_not_start(**arguments):
            assert arguments["tp_size"] == 2 and arguments["model_path"] == "m"
            raise RuntimeError("no such model")
        sys.modules["sglang"].Engine = does_not_start
        error = refused(EngineError, RolloutEngine.launch, mesh, model_path="m", timeout=20)
        assert "no such model" in str(error) and "rank 0 of 2" in str(error)

        # A leader without an engine, and a server that is not there.
        error = refused(ConfigError, RolloutEngine.connect, None, mesh, timeout=20)
        assert "neither an" in str(error)
        error = refused(EngineError, RolloutEngine.connect, "http://127.0.0.1:9", mesh, timeout=20)
        assert "cannot be reached" in str(error) and "rank 0 of 2" in str(error)
        """,
        2,
    )


@pytest.mark.timeout(180)
def test_ranks_that_die_or_hang(run_ranks):
    run_ranks(
        """
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        def connected(timeout):
            _, target = stand_in_engine() if RANK == 0 else (None, None)
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
        """,
        3,
        statuses={1: 7},
    )


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_leader_that_dies_at_work(run_ranks):
    run_ranks(
        """
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        manager, target = stand_in_engine() if RANK == 0 else (None, None)
        engine = RolloutEngine.connect(target, mesh, timeout=60)
        if RANK == 0:
            threading.Timer(1, lambda: os._exit(9)).start()
            manager.generate_seconds = 60
            engine.generate([[1]])
        error = lost(engine.generate, [[1]])
        assert error.took < 30 and "generate" in str(error)
        os._exit(0)
        """,
        2,
        statuses={0: 9},
    )


@pytest.mark.timeout(180)
def test_two_groups_of_two(run_ranks):
    run_ranks(
        """
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        manager, target = stand_in_engine() if RANK % 2 == 0 else (None, None)
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
            store.set(f"comes{RANK}", "")
        engine.sleep(fence=True)
        assert store.check(["comes2", "comes3"])
        engine.wake_up(fence=True)

        # What fails with one engine is heard of by the ranks of all.
        if RANK == 2:
            stand_in.dies_in_a_release(manager)
        error = refused(EngineTimeoutError, engine.sleep, fence=True, timeout=1)
        assert list(error.failures) == [2] and "rank 2 of 4" in str(error)
        assert engine.status is (Status.ASLEEP if RANK < 2 else Status.UNKNOWN)
        if RANK < 2:
            engine.wake_up()
        dist.barrier()

        # A new engine; a block that fails on one rank of a fence.
        if RANK == 2:
            manager, target = stand_in_engine()
        engine = RolloutEngine.connect(target, mesh, timeout=20)
        engine.sleep()
        try:
            with engine.staged_wake(fence=True):
                if RANK == 3:
                    raise OSError("no update")
        except OSError:
            assert RANK == 3
        except md.RankError as error:
            assert RANK != 3 and "rank 3" in str(error) and "no update" in str(error)
        else:
            raise AssertionError
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
        _, own = stand_in_engine()
        alone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        each = RolloutEngine.connect(own, alone, timeout=20)
        assert each.layout.is_leader and each.layout.dp_rank == RANK
        assert rows(each.generate([[RANK]], TWO)) == [[RANK, RANK + 1]]
        for bad in (dict(tp="model"), dict(dp="replicate")):
            with pytest.raises(ConfigError, match="dimensions are 'replicate', 'shard', 'model'"):
                RolloutEngine.connect(target, both, **bad)

        # A server for each group, by URL.
        urls = gathered(stand_in.Server(manager).url if manager else "")
        servers = RolloutEngine.connect([urls[0], urls[2]], mesh, timeout=20)
        assert rows(servers.generate([[RANK + 7]], TWO)) == [[RANK + 7, RANK + 8]]
        os._exit(0)  # with the servers' threads
        """,
        4,
    )
