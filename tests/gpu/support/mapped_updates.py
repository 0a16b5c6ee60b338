"""Checks updates from shareable tags, whose tensors the engine maps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainer_weights import in_the_engines_layout, outputs, state

MIB = 1 << 20


def check_mapped(engine: Any, first: list[list[int]]) -> None:
    """Check updates from a shareable tag whose tensors the engine maps."""
    import torch

    import memsaver

    for layout, made in (("whole", state), ("engine", in_the_engines_layout)):
        with memsaver.region(f"shared {layout}", backup="host", shareable=True):
            weights = {name: t.clone() for name, t in made(1).items()}
        torch.cuda.empty_cache()
        for seed in (2, 1, 1):
            for name, tensor in made(seed).items():
                weights[name].copy_(tensor)
            del tensor
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            report = engine.update_weights(weights, layout=layout, verify="full")
            peak = torch.cuda.max_memory_allocated() - before
            print(f"mapped, {layout}: {report}, peak {peak / MIB:.1f} MiB", flush=True)
            assert report.mapped == report.held == report.tensors, report
            assert not report.unverified and not report.buckets and peak <= MIB, peak
            memsaver.pause(f"shared {layout}")  # at once
            assert (outputs(engine) == first) == (seed == 1), (layout, seed)
            memsaver.resume(f"shared {layout}")
        for name in list(weights)[::2]:
            weights[name] = weights[name].clone()  # in no region
        report = engine.update_weights(weights, layout=layout, verify="full")
        assert report.held == report.tensors > report.mapped > 0 < report.buckets, report
        assert outputs(engine) == first


def check_offloaded(engine: Any, first: list[list[int]]) -> None:
    """Check updates from an offloaded model in a shareable tag, before and after the tag sleeps."""
    import torch

    import memsaver
    from memsaver.integrations.trainer import offload

    with memsaver.region("offloaded", backup="host", shareable=True):
        pass
    weights = state(1)
    model = torch.nn.ParameterList([torch.nn.Parameter(t) for t in weights.values()])
    names = list(weights)
    del weights
    handle = offload(model, tag="offloaded")
    for _ in range(2):
        sent = {name: t.detach() for name, t in zip(names, model, strict=True)}
        report = engine.update_weights(sent, verify="full")
        assert report.mapped == report.held == report.tensors and not report.buckets, report
        assert outputs(engine) == first
        memsaver.pause("offloaded")  # at once
        assert outputs(engine) == first
        memsaver.resume("offloaded")
    handle.close()


def check_serializer() -> None:
    """Check that SGLang's serializer sends a tensor of a shareable tag without a copy."""
    import torch
    from sglang.srt.utils import MultiprocessingSerializer

    import memsaver

    sys.path.append(str(Path(__file__).parents[2] / "support"))
    from importing_process import importing_process

    with memsaver.region("serialized", backup="host", shareable=True):
        tensor = torch.arange(4096, device="cuda")
    text = MultiprocessingSerializer.serialize({"x": tensor[1:]}, output_str=True)
    with importing_process() as other:
        other.do("from sglang.srt.plugins import load_plugins; load_plugins()")  # as engines do
        other.do("from sglang.srt.utils import MultiprocessingSerializer")
        other.do(f"x = MultiprocessingSerializer.deserialize({text!r})['x']")
        other.do("x.add_(1); torch.cuda.synchronize()")
        assert tensor[[0, 1, -1]].tolist() == [0, 2, 4096]
        other.do("del x; gc.collect()")
        memsaver.pause("serialized")  # at once
    memsaver.resume("serialized")
    assert tensor[[0, 1, -1]].tolist() == [0, 2, 4096]
