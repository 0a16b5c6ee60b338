"""Runs a scenario in which an engine dies and restarts; exits with status 0 on success.

usage: restart_child.py SCENARIO FOLDER
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rollout_child import PROMPTS, arguments, greedy, in_background, play, rows
from trainer_weights import outputs, state
from weight_sync_child import refused

MIB = 1 << 20
LONG = 1500  # tokens
RESTART_SECONDS = 120
SLACK = 96 * MIB  # driver's own memory, and torch's cached segments


def options(folder: Path) -> dict[str, Any]:
    """Return engine arguments that make the engine's memory independent of the free memory."""
    given = {**arguments(folder), "max_total_tokens": 16384, "disable_cuda_graph": True}
    given.pop("cuda_graph_bs_decode")
    return given


def processes(engine: Any) -> list[Any]:
    return list(engine.backend.link.engine.tokenizer_manager._subprocess_watchdog._processes)


def scheduler(engine: Any) -> int:
    """Return the id of the process that contains the model."""
    return int(processes(engine)[0].pid)


def free() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])


def settled_free(at_least: int) -> int:
    """Return the free memory once it is at least `at_least` bytes, or after a few seconds."""
    deadline = time.monotonic() + 10
    while free() < at_least and time.monotonic() < deadline:
        time.sleep(0.1)
    return free()


def report_seconds(what: str, began: float) -> None:
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


def deaths(folder: Path) -> None:
    """Kill the engine and make it fail in several ways; each time, the lost batch is answered."""
    import torch

    from memsaver.integrations.rollout import RestartLimitError, Restarts, RolloutEngine
    from memsaver.integrations.sglang import EngineDiedError

    torch.cuda.set_device(0)
    weights = state(2)  # the model's path has other weights
    trainer = {name: tensor.clone() for name, tensor in weights.items()}
    gone: list[int] = []

    def send(engine: Any) -> None:
        report = engine.update_weights(weights, verify="full", version="trainer")
        assert report.held == report.tensors, report

    flag = Path(os.environ["MEMSAVER_TEST_FAILS"])
    torch.cuda.empty_cache()
    empty = free()  # beside the trainer's tensors
    began = time.monotonic()
    restarts = Restarts(most=5, seconds=3600, send=send)
    engine = RolloutEngine.launch(**options(folder), timeout=120, restarts=restarts)
    with engine:
        report_seconds("start", began)
        loaded = outputs(engine)
        send(engine)
        first = outputs(engine)
        assert first != loaded
        torch.cuda.empty_cache()
        before, held = free(), torch.cuda.memory_allocated()

        def check(what: str, began: float) -> None:
            report_seconds(what, began)
            assert outputs(engine) == first, what
            output = engine.generate([PROMPTS[0]], greedy())
            assert output.weight_version == "trainer", output.weight_version
            torch.cuda.empty_cache()
            assert torch.cuda.memory_allocated() == held, what
            now = settled_free(before - SLACK)
            print(f"{what}: {(before - now) / MIB:.0f} MiB less are free", flush=True)
            assert abs(now - before) < SLACK, (what, now, before)
            assert all(torch.equal(weights[name], trainer[name]) for name in trainer), what

        def note() -> None:
            gone[:] = [process.pid for process in processes(engine)]

        note()
        os.kill(scheduler(engine), signal.SIGKILL)
        began = time.monotonic()
        assert rows(engine.generate([PROMPTS[0]], greedy())) == [first[0]]
        check("killed between generations", began)
        assert not any(Path(f"/proc/{pid}").exists() for pid in gone)

        work, results = in_background(engine, LONG)
        deadline = time.monotonic() + 30
        requests = engine.backend.link.engine.tokenizer_manager.rid_to_state
        while not any(one.output_ids for one in list(requests.values())):
            assert time.monotonic() < deadline and work.is_alive()
            time.sleep(0.005)
        began = time.monotonic()
        os.kill(scheduler(engine), signal.SIGKILL)
        work.join(RESTART_SECONDS)
        (output,) = results
        assert output.lengths.tolist() == [LONG] and output.finish_reasons == ("length",)
        check("killed in a generation", began)

        for kind in ("exception", "cuda"):
            flag.write_text(kind)
            began = time.monotonic()
            assert rows(engine.generate([PROMPTS[0]], greedy())) == [first[0]]
            assert not flag.exists()
            check(f"a scheduler with the failure {kind!r}", began)

        # A scheduler that ends while it loads weights has not closed the trainer's bucket.
        pid = scheduler(engine)
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        began = time.monotonic()
        refused(EngineDiedError, engine.update_weights, weights)
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() == held, "the bucket was not freed"
        engine.restart()
        check("killed in an update", began)

        note()
        os.kill(scheduler(engine), signal.SIGKILL)
        began = time.monotonic()
        refused(RestartLimitError, engine.generate, [PROMPTS[0]], greedy())
        assert time.monotonic() - began < 30
        assert not any(Path(f"/proc/{pid}").exists() for pid in gone)
    assert not any(Path(f"/proc/{pid}").exists() for pid in gone)
    torch.cuda.empty_cache()
    now = settled_free(empty - SLACK)
    print(f"after the end: {(empty - now) / MIB:.0f} MiB less are free", flush=True)
    assert now > empty - SLACK, (now, empty)
    assert all(torch.equal(weights[name], trainer[name]) for name in trainer)


def session(folder: Path) -> None:
    """Kill the engine during a session's rollout; the new engine receives the trainer's weights."""
    import torch

    from memsaver.integrations.rollout import ColocatedSession, Restarts, RolloutEngine

    torch.cuda.set_device(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(t) for t in state(2).values()])
    names = list(state(2, device="cpu"))
    sessions: list[Any] = []
    restarts = Restarts(most=1, send=lambda engine: sessions[0].send_weights())
    with RolloutEngine.launch(**options(folder), timeout=120, restarts=restarts) as engine:
        made = ColocatedSession(
            engine, model, state=lambda: dict(zip(names, (p.data for p in model), strict=True))
        )
        sessions.append(made)
        with made.rollout():
            first = outputs(engine)
            began = time.monotonic()
            os.kill(scheduler(engine), signal.SIGKILL)
            assert rows(engine.generate([PROMPTS[0]], greedy())) == first[:1]
            assert outputs(engine) == first
            report_seconds("a rollout with a restart", began)
        with made.training(), torch.no_grad():
            for parameter, tensor in zip(model, state(2).values(), strict=True):
                assert torch.equal(parameter, tensor)
        with made.rollout():
            assert outputs(engine) == first
        with made.training():
            pass
        made.close()


def in_place(folder: Path) -> None:
    """Kill the engine while it maps the trainer's weights; the weights' tag can be paused and
    resumed.
    """
    import torch

    import memsaver
    from memsaver._runtime.native import _C
    from memsaver.integrations.rollout import Restarts, RolloutEngine
    from memsaver.integrations.sglang import EngineDiedError

    torch.cuda.set_device(0)
    with memsaver.region("trainer", backup="host", shareable=True):
        weights = {name: tensor.clone() for name, tensor in state(2).items()}
    trainer = {name: tensor.clone() for name, tensor in weights.items()}

    def send(engine: Any) -> None:
        report = engine.update_weights(weights, verify="full")
        assert report.mapped == report.held == report.tensors, report

    flag = Path(os.environ["MEMSAVER_TEST_FAILS"])
    restarts = Restarts(most=1, send=send)
    with RolloutEngine.launch(**options(folder), timeout=120, restarts=restarts) as engine:
        send(engine)
        first = outputs(engine)
        flag.write_text("killed")
        began = time.monotonic()
        refused(EngineDiedError, send, engine)
        assert not flag.exists(), "the scheduler was not killed in the load"
        memsaver.pause("trainer")
        report_seconds("killed in an update in place, until the pause", began)
        assert _C.importers() == []
        memsaver.resume("trainer")
        assert all(torch.equal(weights[name], trainer[name]) for name in trainer)
        engine.restart()
        assert outputs(engine) == first
    assert all(torch.equal(weights[name], trainer[name]) for name in trainer)


SCENES = {"deaths": deaths, "session": session, "in_place": in_place}


if __name__ == "__main__":
    here = str(Path(__file__).with_name("failing"))
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["MEMSAVER_TEST_FAILS"] = str(Path(sys.argv[2]) / "fails")
    with contextlib.suppress(FileNotFoundError):
        Path(os.environ["MEMSAVER_TEST_FAILS"]).unlink()
    play(SCENES)
