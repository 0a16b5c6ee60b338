"""Tests CUDA graphs with memory in tags, and pauses during captures."""

from __future__ import annotations

from typing import Any

import torch
from expected_errors import raises

import memsaver
from torch_cases.tensors import MIB, allocated, free, held, inside, is_numbered, numbered, tidy


def case_pause_inside_a_capture(tag: str) -> None:
    """A pause during a capture raises; the graph can still be completed and replayed."""
    with memsaver.region(tag, backup="host"):
        weight = numbered(4)
    source = torch.ones(1024, device="cuda")
    for scope in (torch.cuda.graph, memsaver.graph):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with scope(graph):
            doubled = source * 2
            with raises(memsaver.InvalidStateError):
                memsaver.pause(tag)
            with raises(memsaver.InvalidStateError):
                memsaver.pause()
            result = doubled + 1
        assert memsaver.state(tag) == "mapped"
        for value in (3.0, 5.0):
            source.fill_(value)
            graph.replay()
            assert torch.all(result == 2 * value + 1)
        assert is_numbered(weight)
        memsaver.pause(tag)
        memsaver.resume(tag)
        assert is_numbered(weight)
        source.fill_(1.0)
        del graph, doubled, result
        tidy()


def case_graph_is_paused_and_replayed(tag: str) -> None:
    """A graph's memory is in the graph's tag, can be paused and resumed, and is freed with the
    graph.
    """
    source = torch.ones(16 * MIB, device="cuda")
    (source * 2 + 1).sum()
    graph = torch.cuda.CUDAGraph()
    with memsaver.graph(graph, tag=tag):
        result = (source * 2 + 1).sqrt()
    graph.replay()
    expected = result.clone()
    assert inside(result, tag)
    address = result.data_ptr()
    before = free()
    assert held(tag) >= 64 * MIB
    for backup in ("none", "host"):
        report = memsaver.pause(tag, backup=backup)
        assert free() - before >= 0.98 * report.bytes - 16 * MIB
        assert memsaver.resume(tag).changed == (tag,)
        assert torch.equal(result, expected) == (backup == "host")
        graph.replay()
        assert torch.equal(result, expected)
        assert result.data_ptr() == address
    second = torch.cuda.CUDAGraph()
    with memsaver.graph(second, tag=tag, pool=graph.pool()):
        other = (source * 3).exp()
    second.replay()
    assert inside(other, tag)
    del graph, second, result, other
    tidy()
    assert allocated(tag) == 0
    assert held(tag) == 0


def case_graphs_share_a_pool_that_the_caller_made(tag: str) -> None:
    """Graphs captured with the same torch pool handle share memory in the tag during their
    lifetime.
    """
    source = torch.ones(16 * MIB, device="cuda")
    for _ in range(2):  # before the second round, the first round's graphs are destroyed
        handle, graphs, results, bytes_after = torch.cuda.graph_pool_handle(), [], [], []
        for number in range(3):
            graphs.append(torch.cuda.CUDAGraph())
            with memsaver.graph(graphs[-1], tag=tag, pool=handle):
                results.append((source * (number + 2)).sum())  # a temporary of 64 MiB
            bytes_after.append(held(tag))
        assert bytes_after[0] >= 64 * MIB
        assert bytes_after[-1] < 2 * 64 * MIB
        assert all(inside(result, tag) for result in results)
        before = free()
        report = memsaver.pause(tag)
        assert free() - before >= 0.98 * report.bytes - 16 * MIB
        memsaver.resume(tag)
        for number, graph in enumerate(graphs):
            graph.replay()
            assert results[number].item() == (number + 2) * 16 * MIB
        graphs.clear()
        results.clear()
        del graph
        tidy()
        assert allocated(tag) == 0
    again = torch.cuda.CUDAGraph()
    with memsaver.graph(again, tag=tag, pool=handle):  # usable although its graphs are destroyed
        result = source * 2
    assert inside(result, tag)
    del again, result
    tidy()
    assert held(tag) == 0


def case_backward_inside_a_graph(tag: str) -> None:
    """Memory that autograd's threads allocate during a capture belongs to the graph's tag."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    ).to("cuda")
    batch = torch.randn(256, 512, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's thread allocates its cuBLAS workspace here
        for _ in range(2):
            model(batch).square().mean().backward()
    stream.synchronize()
    parameters: list[Any] = list(model.parameters())
    expected = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with memsaver.graph(graph, tag=tag, stream=stream):
        loss = model(batch).square().mean()
        loss.backward()
    gradients = [parameter.grad for parameter in parameters]
    assert inside(loss, tag)
    assert all(inside(gradient, tag) for gradient in gradients), "gradients outside of the tag"

    def check() -> None:
        graph.replay()
        for gradient, wanted in zip(gradients, expected, strict=True):
            # The warm-up accumulated two gradients.
            assert torch.allclose(2 * gradient, wanted, rtol=1e-3, atol=1e-6)

    check()
    exact = [gradient.clone() for gradient in gradients]
    for _ in range(2):
        memsaver.pause(tag)
        assert held(tag) == 0
        memsaver.resume(tag)
        check()
        for gradient, wanted in zip(gradients, exact, strict=True):
            assert torch.equal(gradient, wanted)


def case_two_graphs_in_two_tags(tag: str) -> None:
    """A graph can be replayed while another graph's tag is paused, because the graphs share no
    workspace.
    """
    torch._C._cuda_clearCublasWorkspaces()
    left, right = torch.randn(64, 16384, device="cuda"), torch.randn(16384, 64, device="cuda")
    torch.mm(left, right)
    graphs, results = [], []
    for number in range(2):
        graph = torch.cuda.CUDAGraph()
        with memsaver.graph(graph, tag=f"{tag}.{number}"):
            results.append(left @ right)
        graphs.append(graph)
    for graph in graphs:
        graph.replay()
    expected = results[1].clone()
    with memsaver.paused(f"{tag}.0"):
        results[1].zero_()
        graphs[1].replay()
        torch.cuda.synchronize()
    assert torch.equal(results[1], expected)
