"""Tests torch.inference_mode, torch.compile and graphed callables with tensors in regions."""

from __future__ import annotations

import copy
import shutil
import sysconfig
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import memsaver
from torch_cases.tensors import MIB, free, held, inside, is_numbered, numbered


def layers(width: int = 256) -> Any:
    """Return a small network on the GPU, with the same weights in each call."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    ).to("cuda")


def compiled(function: Any, graphs: bool = False) -> Any:
    """Return the function compiled with a backend that works on this machine, with or without CUDA
    graphs.
    """
    tools = shutil.which("cc") and Path(sysconfig.get_paths()["include"], "Python.h").exists()
    if not (tools and find_spec("triton")):
        return torch.compile(function, backend="cudagraphs" if graphs else "aot_eager")
    return torch.compile(function, mode="reduce-overhead" if graphs else None)


def case_inference_mode(tag: str) -> None:
    """Regions, pauses and backup views work in inference mode, and on inference tensors outside
    inference mode.
    """
    with torch.inference_mode():
        with memsaver.region(tag, backup="host"):
            tensor = numbered(8)
        assert tensor.is_inference() and inside(tensor, tag)
        expected = tensor.cpu()
        with memsaver.paused(tag):
            assert torch.equal(memsaver.backup_view(tensor).clone(), expected)
        assert torch.equal(tensor.cpu(), expected)

    @torch.inference_mode()
    @memsaver.region(tag)
    def make() -> Any:
        return numbered(4, 2)

    other = make()
    assert inside(other, tag)
    with memsaver.paused(tag):
        assert torch.equal(memsaver.backup_view(tensor).clone(), expected)
    assert torch.equal(tensor.cpu(), expected) and is_numbered(other, 2)


def case_compiled_model(tag: str) -> None:
    """A compiled model's weights and outputs can be paused and resumed."""
    with memsaver.region(tag, backup="host"):
        model = layers()
    batch = torch.randn(32, 256, device="cuda")
    with torch.no_grad():
        eager = model(batch)
        fast = compiled(model)
        expected = fast(batch).clone()
        assert torch.allclose(expected, eager, rtol=1e-2, atol=1e-2)
        with memsaver.paused(tag):
            assert held(tag) == 0
        assert torch.equal(fast(batch), expected)
        with memsaver.region(tag + ".outputs", backup="host"):
            output = fast(batch)
        assert inside(output, tag + ".outputs")
        with memsaver.paused(tag, tag + ".outputs"):
            pass
        assert torch.equal(output, expected) and torch.equal(fast(batch), expected)


def case_region_inside_a_compiled_function(tag: str) -> None:
    """A compiled function can open and close a region; torch runs this part of it uncompiled."""

    def function(x: Any) -> Any:
        y = x + 1
        with memsaver.region(tag):
            z = y * 2
        return z

    fast = torch.compile(function, backend="eager")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Dynamo does not trace regions
            result = fast(torch.ones(1024, device="cuda"))
        assert inside(result, tag) and bool((result == 4).all())
    memsaver.pause(tag)  # raises if a region is still open
    memsaver.resume(tag)


def case_compiled_with_graphs(tag: str) -> None:
    """The compiler's CUDA graphs work after a resume, because the weights keep their addresses."""
    with memsaver.region(tag, backup="host"):
        model = layers()
    batch = torch.randn(32, 256, device="cuda")
    with torch.no_grad():
        fast = compiled(model, graphs=True)
        for _ in range(4):
            expected = fast(batch).clone()
        for _ in range(2):
            memsaver.pause(tag)
            assert held(tag) == 0
            memsaver.resume(tag)
            assert torch.equal(fast(batch).clone(), expected)


def case_graphed_callables(tag: str) -> None:
    """All memory of graphs from make_graphed_callables can be in a tag."""
    graphs = tag + ".graphs"
    with memsaver.region(tag, backup="host"):
        model = layers()
    twin = copy.deepcopy(model)
    pool = memsaver.torch_pool(graphs)
    sample = torch.randn(64, 256, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (sample,), pool=pool.id)
    assert held(graphs) > 0

    def check(seed: int) -> None:
        torch.manual_seed(seed)
        batch = torch.randn(64, 256, device="cuda")
        results = []
        for module in (graphed, twin):
            data = batch.clone().requires_grad_()
            module.zero_grad()
            output = module(data)
            output.square().mean().backward()
            results.append(
                [output.detach().clone(), data.grad, *[p.grad for p in module.parameters()]]
            )
        for ours, plain in zip(*results, strict=True):
            assert torch.allclose(ours, plain, rtol=1e-2, atol=1e-4)

    check(1)
    assert inside(graphed(sample.detach().clone().requires_grad_()), graphs)
    for seed in (2, 3):
        before = free()
        report = memsaver.pause(tag, graphs)
        assert held(tag) == held(graphs) == 0
        assert free() - before >= 0.9 * report.bytes - 64 * MIB  # pinned memory uses some
        memsaver.resume(tag, graphs)
        check(seed)
