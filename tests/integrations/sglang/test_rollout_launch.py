"""Tests the start of an engine: its GPUs and ports, and the unchanged state of this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from launchable_engine import launchable

from memsaver.errors import ConfigError, NotLoadedError
from memsaver.integrations.engine import processes
from memsaver.integrations.engine.errors import EngineError, EngineTimeoutError
from memsaver.integrations.engine.placement import Gpu, Sizes
from memsaver.integrations.engine.policies import Policy
from memsaver.integrations.engine.status import Status
from memsaver.integrations.rollout import RolloutEngine
from memsaver.integrations.sglang import hooks, settings
from memsaver.integrations.sglang import launch as launching
from memsaver.integrations.sglang import placement as placing
from memsaver.integrations.sglang.launch import launch, launch_node
from memsaver.integrations.sglang.placement import place, sizes_of

ALL_GPUS = "0,1,2,3"


def gpus(*indices, visible=None, host="a"):
    return [Gpu(host, visible, index) for index in indices]


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "base", "step", "visible"),
    [
        (gpus(0), 0, 1, None),
        (gpus(2, 3), 2, 1, None),
        (gpus(0, 2), 0, 2, None),
        (gpus(2, 3, visible="4,5,6,7"), 2, 1, None),
        (gpus(3, 2), 0, 1, "3,2"),  # SGLang counts upwards
        (gpus(0, 1, 3), 0, 1, "0,1,3"),
        ([Gpu("a", "6", 0), Gpu("a", "7", 0)], 0, 1, "6,7"),  # each sees only its own, as in Ray
        ([Gpu("a", "GPU-x", 0), Gpu("a", "GPU-y", 0)], 0, 1, "GPU-x,GPU-y"),
        ([Gpu("a", "4, 5", 1), Gpu("a", "6,7", 0)], 0, 1, "5,6"),
    ],
)
def test_an_engine_gets_the_gpus_of_its_ranks(ranks, base, step, visible):
    placement = place(ranks, 0)
    assert placement.arguments["base_gpu_id"] == base
    assert placement.arguments["gpu_id_step"] == step
    assert placement.visible == visible


def test_the_gpus_of_pipeline_stages_are_adjacent():
    """SGLang ignores the step between the GPUs of a pipeline's stages."""
    assert place(gpus(2, 3), 0, Sizes(1, stages=2)).arguments["base_gpu_id"] == 2
    placement = place(gpus(0, 2), 0, Sizes(1, stages=2))
    assert placement.arguments["gpu_id_step"] == 1 and placement.visible == "0,2"


@pytest.mark.parametrize("ranks", [gpus(0, 1), [None, None]])
def test_sglang_chooses_a_port_for_each_replica(ranks):
    """With a given port, all replicas would bind the same port."""
    assert "nccl_port" in place(ranks, 0, Sizes(2)).arguments
    assert "nccl_port" not in place(ranks, 0, Sizes(1, replicas=2)).arguments


@pytest.mark.parametrize(
    ("arguments", "ranks", "sizes"),
    [
        ({}, 4, (4, 1, 1)),
        ({}, None, (1, 1, 1)),
        ({"tp_size": 2}, 4, (2, 1, 1)),
        ({"pp_size": 2}, 4, (2, 2, 1)),
        ({"dp_size": 2}, 2, (1, 1, 2)),
        ({"dp_size": 2, "pp_size": 2, "tp_size": 1}, 5, (1, 2, 2)),
        ({"dp_size": 2, "enable_dp_attention": True}, 2, (2, 1, 1)),
        ({"dp_size": 2, "pp_size": 4, "tp_size": 8}, None, (8, 4, 2)),
    ],
)
def test_the_numbers_of_an_engines_ranks(arguments, ranks, sizes):
    assert sizes_of(arguments, ranks) == Sizes(*sizes)


@pytest.mark.parametrize(
    "arguments", [{"dp_size": 3}, {"pp_size": 2, "tp_size": 2}, {"dp_size": 0}, {"pp_size": "2"}]
)
def test_too_many_ranks_are_rejected(arguments):
    with pytest.raises(ConfigError, match="groups have 2 ranks"):
        sizes_of(arguments, 2)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (gpus(0, 0), "use the GPUs 0, 0"),
        ([Gpu("a", "4,5", 1), Gpu("a", "5", 0)], "use the GPUs 5, 5"),
        (gpus(0) + gpus(1, host="b") + gpus(2), "they are on a, b, a"),
        (gpus(0, 1) + gpus(2, host="b"), "they are on a, a, b"),
        (gpus(0, 1) + gpus(0, 0, host="b"), "use the GPUs 0, 0"),
        ([None, *gpus(0)], "only some ranks"),
    ],
)
def test_invalid_places_are_rejected(ranks, text):
    with pytest.raises(ConfigError, match=text):
        place(ranks, 0)


def test_an_engine_on_two_hosts_has_a_node_on_each():
    placement = place(gpus(2, 3) + gpus(0, 1, host="b", visible=ALL_GPUS), 0)
    (node,) = placement.nodes
    first, second = placement.arguments, node.arguments
    assert (first["nnodes"], first["node_rank"]) == (2, 0)
    assert (second["nnodes"], second["node_rank"]) == (2, 1)
    assert first["dist_init_addr"] == second["dist_init_addr"]
    assert first["dist_init_addr"].startswith("a:") and "nccl_port" not in first
    assert (first["base_gpu_id"], second["base_gpu_id"]) == (2, 0)
    assert "port" in first and "port" not in second


def test_engines_of_a_host_have_ports_apart():
    places = [place(gpus(0, 1), 0), place(gpus(2, 3), 1), place([None], 0), place([None], 1)]
    ports = [set(one.arguments[name] for name in ("port", "nccl_port")) for one in places]
    assert all(len(pair) == 2 for pair in ports)
    assert not ports[0] & ports[1] and not ports[2] & ports[3]
    with placing.socket.socket() as taken:
        taken.bind(("", min(ports[0])))
        assert min(ports[0]) not in place(gpus(0, 1), 0).arguments.values()


# --- effects on this process ----------------------------------------------------------------------


@pytest.fixture
def sglang(monkeypatch):
    with launchable(monkeypatch) as made:
        yield made


@pytest.fixture
def surroundings():
    """Yield a function that returns process state that must not change; restore the state
    afterwards.
    """

    def now():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
        theirs = ("SGLANG_", "PYTEST_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
        return environment, handlers, multiprocessing.get_start_method(allow_none=True)

    before = now()
    yield now
    left = now()
    for number, handler in before[1].items():
        signal.signal(number, handler)
    os.environ.pop("SGLANG_RUN_ID", None)
    assert left[1:] == before[1:]  # a test may have changed the environment


def test_a_launch_leaves_this_process_unchanged(sglang, surroundings, monkeypatch):
    torchrun = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "1234"}
    torchrun |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    for name, text in {**torchrun, "CUDA_VISIBLE_DEVICES": ALL_GPUS}.items():
        monkeypatch.setenv(name, text)
    before = surroundings()
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        placement = place([Gpu("a", "6", 0), Gpu("a", "7", 0)], 0)
        backend = launch(placement, 2, {"model_path": "m", "log_level": "info"}, 30)
        (seen,) = sglang.seen
        assert not set(torchrun) & set(seen.environment)
        assert seen.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
        assert seen.environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
        assert seen.arguments["tp_size"] == backend.tp_size == 2
        assert seen.arguments["skip_tokenizer_init"] and seen.arguments["enable_memory_saver"]
        assert (seen.arguments["model_path"], seen.arguments["log_level"]) == ("m", "info")
        environment, handlers, method = surroundings()
        assert environment == before[0] and method == before[2]
        assert os.environ["SGLANG_RUN_ID"] == "sglang-run-1"  # SGLang's own
        assert handlers[signal.SIGTERM] == before[1][signal.SIGTERM]
        # A signal from SGLang's dying processes does not end this process.
        os.kill(os.getpid(), signal.SIGQUIT)
        seen.processes[0].kill()
        seen.processes[0].join(10)
        with pytest.raises(EngineError, match="exited with status -9"):
            backend.control.sleep()
        backend.close()
        backend.close()
        assert not any(process.is_alive() for process in seen.processes)
        assert own.poll() is None and surroundings() == before
    finally:
        own.kill()
        own.wait()


def test_an_engine_that_does_not_start(sglang, surroundings, monkeypatch):
    before, place_of_one = surroundings(), place([None], 0)
    for error, kind, text in (
        (RuntimeError("Initialization failed."), EngineError, "Initialization failed"),
        (TypeError("unexpected keyword argument 'modle_path'"), ConfigError, "modle_path"),
    ):
        sglang.error = error
        with pytest.raises(kind, match=text):
            launch(place_of_one, None, {}, 30)
    with pytest.raises(ConfigError, match="positive number of seconds"):
        launch(place_of_one, None, {"model_path": "m"}, float("inf"))
    with pytest.raises(ConfigError, match=r"tp_size=4.*2 ranks"):
        launch(place([None, None], 0), 2, {"tp_size": 4}, 30)
    sglang.error = None
    with monkeypatch.context() as patch:  # an engine whose version is not supported
        version = types.ModuleType("sglang.version")
        version.__version__ = "0.5.9"
        patch.setitem(sys.modules, "sglang.version", version)
        with pytest.raises(ConfigError, match=r"0\.5\.9"):
            launch(place_of_one, None, {}, 30)
    sglang.start_seconds, start = 60, time.monotonic()
    with pytest.raises(EngineTimeoutError, match="within 1"):
        launch(place_of_one, None, {}, 1)
    assert time.monotonic() - start < 30 and surroundings() == before


@pytest.mark.parametrize("fails", [False, True])
def test_processes_of_other_threads_outlive_an_engine_that_they_were_started_with(sglang, fails):
    """For example, another thread might start the workers of a DataLoader at the same time."""
    others = []
    context = multiprocessing.get_context("spawn")
    ended = threading.Event()

    def start_another():
        while not sglang.seen:
            time.sleep(0.01)
        others.append(context.Process(target=time.sleep, args=(600,)))
        others[0].start()
        ended.wait(60)

    sglang.start_seconds, sglang.failures = 1, int(fails)
    thread = threading.Thread(target=start_another)
    thread.start()
    try:
        if fails:
            with pytest.raises(EngineError, match="out of memory"):
                launch(place([None], 0), None, {}, 60)
        else:
            launch(place([None], 0), None, {}, 60).close()
        assert not any(process.is_alive() for process in sglang.seen[0].processes)
        assert others[0].is_alive()
    finally:
        ended.set()
        thread.join()
        others[0].kill()
        others[0].join()


def test_a_rollout_engine_that_starts_its_own(sglang, surroundings):
    pytest.importorskip("torch")
    before = surroundings()
    with RolloutEngine.launch(model_path="m", tp_size=2, timeout=30) as engine:
        assert engine.tp_size == 2 and engine.status is Status.AWAKE
        assert sglang.seen[0].arguments["model_path"] == "m"
        assert engine.generate([[1]], {"max_new_tokens": 2}).token_ids.tolist() == [[1, 2]]
        with engine.asleep():
            assert engine.status is Status.ASLEEP
    assert surroundings() == before


def test_each_engine_has_the_policy_of_its_launch(sglang, surroundings, monkeypatch):
    pytest.importorskip("torch")
    module = types.ModuleType("sglang.srt.managers.tokenizer_manager")
    module.TokenizerManager = sglang.classes.Tokenizer
    hooks.install_in(module)
    monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP_WAIT", "7")
    before = surroundings()
    given = {"asleep": "wake", "sleep_after": 5, "asleep_requests": 3, "asleep_wait": 0.5}
    for arguments, policy, variables in (
        (given, Policy("wake", 0.5, 5, 3), ("wake", "0.5", "3", "5")),
        ({"asleep": "wait"}, Policy("wait", 7), ("wait", "7", None, None)),
        ({}, Policy("refuse", 7), (None, "7", None, None)),
    ):
        with RolloutEngine.launch(model_path="m", timeout=30, **arguments) as engine:
            assert settings.policy_of(engine.backend.link.engine.tokenizer_manager) == policy
            seen = sglang.seen[-1].environment
            names = ("ASLEEP", "ASLEEP_WAIT", "ASLEEP_REQUESTS", "SLEEP_AFTER")
            assert tuple(seen.get(f"MEMSAVER_SGLANG_{name}") for name in names) == variables
            assert sglang.seen[-1].arguments.keys().isdisjoint(given)
            assert surroundings()[0] == before[0]


@pytest.mark.parametrize("is_dead", [False, True])
def test_the_descendants_of_an_engines_processes_are_ended(tmp_path, is_dead):
    """Processes that SGLang's schedulers started are terminated even if a scheduler was killed."""
    context = multiprocessing.get_context("spawn")
    file = tmp_path / "pid"
    process = context.Process(target=starts_another, args=(file,))
    process.start()
    end = time.monotonic() + 20
    while not file.exists() or not file.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    started = processes.descendants_of(process.pid)
    assert [one.pid for one in started] == [int(file.read_text())] and started[0].runs
    if is_dead:
        process.kill()
        process.join()
    processes.kill([process], started if is_dead else ())
    assert not process.is_alive() and not started[0].runs


def starts_another(file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    file.write_text(str(child.pid))
    child.wait()


def test_an_engine_survives_the_thread_that_started_it(sglang, surroundings):
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("memsaver")}
    backends = []
    thread = threading.Thread(target=lambda: backends.append(launch(place([None], 0), 1, {}, 60)))
    thread.start()
    thread.join()
    (seen,) = sglang.seen
    seen.processes[0].join(0.5)
    assert all(process.is_alive() for process in seen.processes)
    assert backends[0].control.sleep().changed
    backends[0].close()
    assert not any(process.is_alive() for process in seen.processes)
    kept = {thread for thread in threading.enumerate() if thread.name.startswith("memsaver")}
    assert kept <= threads


def test_a_node_is_started_and_ended_with_its_processes(sglang, surroundings):
    before = surroundings()
    (node,) = place(gpus(0) + gpus(0, host="b"), 0).nodes
    end = launch_node(node, 2, {"model_path": "m"}, 30)
    (seen,) = sglang.seen
    assert seen.arguments["node_rank"] == 1 and seen.arguments["tp_size"] == 2
    assert seen.arguments["model_path"] == "m" and seen.arguments["skip_tokenizer_init"]
    assert seen.environment["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0"
    assert "SGLANG_BLOCK_NONZERO_RANK_CHILDREN" not in os.environ
    assert all(process.is_alive() for process in seen.processes)
    os.kill(os.getpid(), signal.SIGQUIT)  # as a scheduler that fails
    end()
    assert surroundings() == before
    assert not any(process.is_alive() for process in seen.processes)
    sglang.error = RuntimeError("no memory")
    with pytest.raises(EngineError, match="no memory"):
        launch_node(node, 2, {"model_path": "m"}, 30)
    assert surroundings() == before


def test_without_sglang_a_launch_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(NotLoadedError, match="SGLang"):
        RolloutEngine.launch(model_path="m")


def test_the_id_of_a_dead_process_may_belong_to_another_process():
    dead = types.SimpleNamespace(
        pid=os.getpid(), is_alive=lambda: False, kill=lambda: None, join=lambda _: None
    )
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        processes.kill([dead])
        child.communicate(b"\n")
        assert child.returncode == 0
    finally:
        child.kill()


def test_signals_and_the_parent_thread_end_although_the_loop_fails():
    def fail():
        raise RuntimeError("the loop failed")

    calls = []
    loop = types.SimpleNamespace(is_closed=lambda: False, is_running=lambda: False, close=fail)
    engine = types.SimpleNamespace(tokenizer_manager=None, shutdown=lambda: None, loop=loop)
    processes = types.SimpleNamespace(end=lambda: calls.append("processes"))
    signals = types.SimpleNamespace(restore=lambda: calls.append("restore"))
    parent = types.SimpleNamespace(end=lambda: calls.append("end"))
    with pytest.raises(RuntimeError, match="the loop failed"):
        launching._end(engine, signals, parent, processes)
    assert calls == ["processes", "restore", "end"]
