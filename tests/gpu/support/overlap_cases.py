"""Tests pauses and resumes of optimizer states during other work on a real GPU.

Each case runs in a separate process:

python tests/gpu/support/overlap_cases.py case_copies_hide_behind_work
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from expected_errors import raises

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from trainers import Trainer

import memsaver
from memsaver.integrations.rollout import ColocatedSession, Stage
from memsaver.integrations.trainer import Offloaded, offload

GIB = 1 << 30


def wide_model() -> torch.nn.Module:
    """Return a model with 1 GiB of weights and 2 GiB of Adam states."""
    return torch.nn.Sequential(
        torch.nn.Linear(32, 16384), torch.nn.Linear(16384, 16384), torch.nn.Linear(16384, 8)
    )


def make() -> tuple[Trainer, Trainer, Offloaded]:
    """Return a trainer with optimizer states, an identical trainer that never pauses, and the first
    trainer's handle.
    """
    trainer = Trainer("adamw_fused", wide_model, "cuda")
    expected = Trainer("adamw_fused", wide_model, "cuda")
    offloaded = offload(trainer.optimizer, tag="optimizer")
    for one in (trainer, expected):
        one.step()
        one.optimizer.zero_grad()
    return trainer, expected, offloaded


def same(trainer: Trainer, expected: Trainer) -> bool:
    """Run one step of both trainers; return whether they have the same contents."""
    for one in (trainer, expected):
        one.step()
        one.optimizer.zero_grad()
    return trainer.contents() == expected.contents()


def multiply(matrix: torch.Tensor, times: int) -> None:
    """Queue GPU work that uses neither the bus nor the host."""
    for _ in range(times):
        matrix @ matrix


def seconds(call: Callable[[], object]) -> float:
    """Return a call's duration; the device is idle before and after the call."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def case_steps_are_bit_equal_and_wait_on_the_device() -> None:
    trainer, expected, offloaded = make()
    early = []
    for number in range(6):
        side = torch.cuda.Stream()
        offloaded.pause(wait=number % 2 == 0)
        arrival = offloaded.resume(wait=False)
        trainer.backward()
        with torch.cuda.stream(side if number > 3 else torch.cuda.current_stream()):
            side.wait_stream(torch.cuda.default_stream())
            trainer.optimizer.step()
        early.append(not arrival.done())
        arrival.wait()
        torch.cuda.synchronize()
        trainer.optimizer.zero_grad()
        expected.backward()
        expected.optimizer.step()
        expected.optimizer.zero_grad()
        assert trainer.contents() == expected.contents(), number
    assert any(early), "the host waited for the copies in every step"


def case_copies_hide_behind_work() -> None:
    trainer, expected, offloaded = make()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    one = seconds(lambda: multiply(matrix, 50)) / 50
    offloaded.pause()
    copies = seconds(offloaded.resume)
    times = max(1, int(1.5 * copies / one))
    work = seconds(lambda: multiply(matrix, times))

    def overlapped() -> None:
        offloaded.resume(wait=False)
        multiply(matrix, times)
        trainer.optimizer.state_dict()  # waits for the copies, on the stream

    def leaving() -> None:
        going = offloaded.pause(wait=False)
        multiply(matrix, times)
        going.wait()

    both = []
    for call in (overlapped, leaving, overlapped, leaving):
        if call is overlapped and offloaded.state == "mapped":
            offloaded.pause()
        both.append(seconds(call))
    offloaded.resume()
    print(f"copies {copies:.3f} s, work {work:.3f} s, together {both}")
    assert min(both[0::2]) < work + 0.5 * copies
    assert min(both[1::2]) < work + 0.5 * copies
    assert same(trainer, expected)


def case_a_failed_resume_is_an_error_of_the_step() -> None:
    trainer, expected, offloaded = make()
    offloaded.pause()
    trainer.backward()
    torch.cuda.empty_cache()
    filler = torch.empty(memsaver.device_memory(0)[0] - GIB, dtype=torch.uint8, device="cuda")
    offloaded.resume(wait=False)
    with raises(memsaver.OutOfDeviceMemoryError) as caught:
        trainer.optimizer.step()
    assert caught[0].tag == "optimizer" and offloaded.state == "paused"
    del filler
    torch.cuda.empty_cache()
    offloaded.resume()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    expected.backward()
    expected.optimizer.step()
    expected.optimizer.zero_grad()
    assert trainer.contents() == expected.contents()


def case_the_first_layer_runs_before_the_last_has_arrived() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(16384, 16384, bias=False, device="cuda") for _ in range(6))
    )
    inputs = torch.randn(64, 16384, device="cuda")
    offloaded = offload(model, tag="model", by_layer=True)
    layers: list[torch.cuda.Event] = []

    def forward(*_: object) -> None:
        layers.append(torch.cuda.Event(enable_timing=True))
        layers[-1].record()

    for layer in model:
        layer.register_forward_hook(forward)
    expected = model(inputs)
    expected.square().mean().backward()
    gradients = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    for number in range(4):
        offloaded.pause()
        layers.clear()
        begin, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        side, copied = torch.cuda.Stream(), torch.cuda.Stream()
        copied.wait_stream(torch.cuda.current_stream())
        begin.record()
        arrival = offloaded.resume(wait=False)
        was_early = not arrival.done()
        arrival.wait_stream(copied)
        last.record(copied)
        with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
            side.wait_event(begin)
            outputs = model(inputs)
            outputs.square().mean().backward()
        torch.cuda.synchronize()
        assert torch.equal(outputs, expected), number
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            assert weight.grad is not None and torch.equal(weight.grad, gradient), number
        model.zero_grad()
        ends = [begin.elapsed_time(event) for event in layers]
        print(f"copies {begin.elapsed_time(last):.1f} ms, layers at", [f"{t:.1f}" for t in ends])
        assert was_early, "the resume ended before it returned"
        assert ends[0] < 0.5 * begin.elapsed_time(last), (
            "the first layer waited for the last copies"
        )
        arrival.wait()
    offloaded.pause()
    graph, static = torch.cuda.CUDAGraph(), inputs.clone()
    offloaded.resume(wait=False)
    with torch.no_grad(), torch.cuda.graph(graph):  # the host waits for all copies
        captured = model(static)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(captured, expected)


class CudaEngine:
    """A fake with the methods of `RolloutEngine` that a session calls, and with memory in this
    process.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        with memsaver.region("weights", backup="none"):
            self.state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
        with memsaver.region("kv_cache", backup="none"):
            self.cache = torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda")
        self.seen: list[str] = []  # the optimizer's state in each update

    def sleep(self, tags: Any = None, **_: Any) -> Any:
        return memsaver.pause("weights", "kv_cache")

    def wake_up(self, tags: Any = None, **_: Any) -> Any:
        return memsaver.resume(*([tags] if tags else ["weights", "kv_cache"]))

    def update_weights(self, state: dict[str, torch.Tensor]) -> None:
        self.seen.append(str(memsaver.state("optimizer")))
        for name, tensor in state.items():
            self.state[name].copy_(tensor)
        torch.cuda.current_stream().synchronize()

    def sums(self) -> list[float]:
        return [float(tensor.double().sum()) for tensor in self.state.values()]


def case_a_session_moves_states_beside_its_stages() -> None:
    run_session(by_layer=False)


def case_a_session_moves_the_model_and_the_states_beside_its_stages() -> None:
    run_session(by_layer=True)


def run_session(by_layer: bool) -> None:
    trainer, expected, _ = make()
    engine = CudaEngine(trainer.model)
    model = offload(trainer.model, tag="model", by_layer=by_layer)
    handle = offload(trainer.optimizer, tag="optimizer")
    session = ColocatedSession(engine, model, handle, state=trainer.model.state_dict, overlap=True)
    for number in range(5):
        with session.rollout():
            sent = engine.sums()
            stages = [report.stage for report in session.stages]
            assert (stages[1] is Stage.RESUME_MODEL) == (number > 1), stages
        with session.training():
            assert sent == [float(t.double().sum()) for t in trainer.model.state_dict().values()]
            assert same(trainer, expected), number
        arrived = ("model", "optimizer") if by_layer else ("optimizer",)
        assert session.stages[-1].result.changed == arrived
    assert "saving" in engine.seen[2:], engine.seen


if __name__ == "__main__":
    warnings.simplefilter("error", memsaver.MemsaverWarning)
    globals()[sys.argv[1]]()
    torch.cuda.synchronize()
    print("held", flush=True)
