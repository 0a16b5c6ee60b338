"""Tests `offload` with captured steps on a real GPU. Each case runs in a separate process:

python tests/gpu/support/offload_graph_cases.py case_a_captured_step_with_gradients_of_the_graph
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from trainers import OPTIMIZERS, Trainer, lies_in, states_of

import memsaver
from memsaver.integrations.trainer import offload

OPTIMIZERS["adamw_capturable"] = lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True)


def captured(
    tag: str | None, set_to_none: bool
) -> tuple[Trainer, torch.Tensor, torch.cuda.CUDAGraph]:
    """Capture a whole training step; return the trainer, the graph's input and the graph.

    With a tag, the optimizer is offloaded before the capture. With `set_to_none`, the gradients'
    memory belongs to the graph. Otherwise, torch allocated the gradients before the capture.
    """
    trainer = Trainer("adamw_capturable", None, "cuda")
    x = torch.ones(4, 32, device="cuda")
    if tag is not None:
        offload(trainer.optimizer, tag=tag)

    def work() -> None:
        trainer.optimizer.zero_grad(set_to_none=set_to_none)
        trainer.model(x).square().mean().backward()
        trainer.optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    if set_to_none:
        trainer.optimizer.zero_grad(set_to_none=True)
    elif tag is not None:
        with memsaver.paused(tag):  # this pause, and no later one, changes the gradients' addresses
            pass
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return trainer, x, graph


def replay(set_to_none: bool) -> None:
    """Check that replays with pauses in between have the same results as in a trainer without
    pauses.
    """
    trainer, x, graph = captured("optimizer", set_to_none)
    expected, other_x, other = captured(None, set_to_none)
    assert all(lies_in(state, "optimizer") for state in states_of(trainer.optimizer))
    for n in range(6):
        x.fill_(n)
        other_x.fill_(n)
        graph.replay()
        other.replay()
        with memsaver.paused("optimizer"):
            gradients = [p.grad for p in trainer.model.parameters()]
            inside = [lies_in(gradient, "optimizer") for gradient in gradients]
            assert not any(inside) if set_to_none else all(inside)
        assert trainer.contents() == expected.contents(), n


def case_a_captured_step_with_gradients_of_the_graph() -> None:
    replay(set_to_none=True)  # the pauses leave them


def case_a_captured_step_with_gradients_from_before() -> None:
    replay(set_to_none=False)  # the pauses include them


if __name__ == "__main__":
    warnings.simplefilter("error", memsaver.MemsaverWarning)
    globals()[sys.argv[1]]()
    torch.cuda.synchronize()
    print("held", flush=True)
