"""Tests tensors in shareable regions that another process maps."""

from __future__ import annotations

import contextlib
import gc
import pickle
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from expected_errors import raises
from importing_process import ImportFailed, ImportingProcess, importing_process

import memsaver
from memsaver._runtime.native import _C
from torch_cases.tensors import MIB, free, is_numbered, numbered, tidy

NOISE = 16 * MIB


@contextlib.contextmanager
def _importer() -> Iterator[ImportingProcess]:
    before = memsaver.options().importer_seconds
    try:
        with importing_process() as process:
            yield process
    finally:
        memsaver.configure(importer_seconds=before)


def case_shared_contents_and_views(tag: str) -> None:
    """Views keep their strides and offsets, both processes see writes, and no memory is copied."""
    with memsaver.region(tag, backup="host", shareable=True):
        large, small = numbered(256, 1), torch.arange(64, device="cuda").reshape(8, 8)
        parameter = torch.nn.Parameter(torch.ones(3, 5, device="cuda"))
    with _importer() as other:
        other.do("z = torch.zeros(1, device='cuda')")  # its context
        before = free()
        other.load("x", {"large": large, "view": small[2:].T, "parameter": parameter})
        assert before - free() < NOISE
        assert other.ask("[x['view'].stride(), x['view'].tolist()]") == [
            list(small[2:].T.stride()),
            small[2:].T.tolist(),
        ]
        assert other.ask("[type(x['parameter']).__name__, x['parameter'].requires_grad]") == [
            "Parameter",
            True,
        ]
        assert other.ask("int(x['large'][-1])") == int(large[-1])
        other.do("x['large'].mul_(5).sub_(x['large'] // 5 * 4); x['large'][0] = -7")
        other.do("torch.cuda.synchronize()")
        assert int(large[0]) == -7
        large[0] = 0
        assert is_numbered(large, 1)
        small.fill_(6)
        torch.cuda.synchronize()
        assert other.ask("int(x['view'].sum())") == 6 * 48


def _add_ten(queue: Any, simple: Any, pipe: Any) -> None:
    for receive in (queue.get, simple.get, pipe.recv):
        tensor = receive()
        tensor.add_(10)
        torch.cuda.synchronize()
        pipe.send(tensor.stride())
        del tensor
        gc.collect()


def case_shared_through_queues_and_pipes(tag: str) -> None:
    """torch.multiprocessing sends views without a copy; the tag can be paused after each
    transfer.
    """
    with memsaver.region(tag, backup="host", shareable=True):
        mine = torch.arange(12, device="cuda").reshape(3, 4)
    expected = mine.clone()
    context = torch.multiprocessing.get_context("spawn")
    queue, simple, (pipe, theirs) = context.Queue(), context.SimpleQueue(), context.Pipe()
    child = context.Process(target=_add_ten, args=(queue, simple, theirs), daemon=True)
    child.start()
    for send in (queue.put, simple.put, pipe.send):
        send(mine[1:].T)
        assert pipe.poll(60) and pipe.recv() == mine[1:].T.stride()
        expected[1:] += 10
        assert torch.equal(mine, expected)
        with memsaver.paused(tag):
            pass
        assert torch.equal(mine, expected)
    child.join(30)
    assert child.exitcode == 0


def case_shared_tag_is_not_paused(tag: str) -> None:
    """A pause waits for importers; if the wait times out, the error names the importers.

    The memory is freed once both processes have released it.
    """
    with memsaver.region(tag, backup="host", shareable=True):
        tensor = numbered(512, 3)
    with _importer() as other:
        other.load("x", tensor)
        memsaver.configure(importer_seconds=0.3)
        with raises(memsaver.TagSharedError) as errors:
            memsaver.pause(tag)
        assert [pid for pid, _ in errors[0].importers] == [other.pid]
        assert is_numbered(tensor, 3)
        with memsaver.region(tag + " other", backup="host"):
            unshared = numbered(8, 4)
        memsaver.pause(tag + " other")
        memsaver.resume(tag + " other")
        assert is_numbered(unshared, 4)
        memsaver.configure(importer_seconds=30)
        other.do("torch.ones(1, device='cuda').add_(1); torch.cuda.synchronize()")  # its context
        mapped = free()
        other.do("x.add_(x); del x; gc.collect()")  # the kernel may still run
        memsaver.pause(tag)
        assert free() - mapped >= 512 * MIB - NOISE
        with raises(memsaver.SharingError):
            ForkingPickler.dumps(tensor)
        memsaver.resume(tag)
        tensor.div_(2, rounding_mode="floor")
        assert is_numbered(tensor, 3)
        other.load("x", tensor[MIB:])
        assert other.ask("int(x[0])") == int(tensor[MIB])


def case_shared_during_a_resume(tag: str) -> None:
    """A tensor that is sent during a resume has its contents in the other process."""
    with memsaver.region(tag, backup="host", shareable=True):
        large, small = numbered(2048, 5), numbered(1, 3)
    with _importer() as other:
        memsaver.pause(tag)
        coming = memsaver.resume(tag, wait=False)
        assert not coming.done()
        other.load("x", {"large": large, "small": small})
        coming.wait()
        assert other.ask("int(x['small'][-1])") == int(small[-1])
        assert other.ask("int(x['large'][-1])") == int(large[-1])
        assert is_numbered(large, 5)


def _stable_free() -> int:
    """Return the number of free bytes, after the memory of earlier processes has been released."""
    before = free()
    while True:
        time.sleep(0.3)
        now = free()
        if now - before < MIB:
            return now
        before = now


def _settled(at_least: int) -> int:
    """Return the number of free bytes once it is at least `at_least`, or after 10 s.

    The driver might still be releasing the memory of a process that has ended.
    """
    deadline = time.monotonic() + 10
    while free() < at_least and time.monotonic() < deadline:
        time.sleep(0.1)
    return free()


def case_shared_importer_is_killed(tag: str) -> None:
    """If an importer is killed while a kernel runs, its import is released and the memory stays
    intact.
    """
    with memsaver.region(tag, backup="host", shareable=True):
        tensor = numbered(256, 2)
    with memsaver.paused(tag):  # the first pause may allocate the driver's own memory
        pass
    assert is_numbered(tensor, 2)  # and the first kernels
    mapped = _stable_free()
    with _importer() as other:
        memsaver.configure(importer_seconds=30)
        other.load("x", tensor)
        other.begin("for _ in range(10000): y = x.clone()")
        other.kill()
        memsaver.pause(tag)
        assert _C.importers() == []
        paused = mapped + 256 * MIB
        assert abs(_settled(paused - NOISE) - paused) < NOISE
        memsaver.resume(tag)
        assert is_numbered(tensor, 2)
        assert abs(_settled(mapped - NOISE) - mapped) < NOISE


EXPORT = f"""
from importing_process import dumped
with memsaver.region("exported", shareable=True):
    y = torch.arange({64 * MIB}, dtype=torch.int32, device="cuda").mul_(5)
torch.cuda.synchronize()
"""


def case_shared_exporter_is_killed(tag: str) -> None:
    """If an exporter is killed while a kernel runs, the contents remain until they are deleted."""
    assert is_numbered(numbered(256, 2), 2)  # the first kernels may allocate memory
    before = _stable_free()
    with _importer() as other:  # exports here
        other.do(EXPORT)
        tensor = pickle.loads(bytes.fromhex(other.ask("dumped(y).hex()")))
        other.begin("for _ in range(10000): z = y.clone()")
        other.kill()
        assert is_numbered(tensor, 2)
        held = before - 256 * MIB
        assert abs(_settled(held - NOISE) - held) < NOISE  # its other memory is free
        tensor.add_(1).sub_(1)
        assert is_numbered(tensor, 2)
        del tensor
        assert abs(_settled(before - NOISE) - before) < NOISE


def case_shared_by_many_small_tensors(tag: str) -> None:
    """One message sends hundreds of tensors, before and after a pause."""
    with memsaver.region(tag, backup="host", shareable=True):
        tensors = [torch.full((MIB,), n, device="cuda", dtype=torch.int32) for n in range(300)]
    with _importer() as other:
        for _ in range(2):
            other.load("x", tensors)
            assert other.ask("[int(t[-1]) for t in x]") == list(range(300))
            other.do("del x; gc.collect()")
            memsaver.pause(tag)
            memsaver.resume(tag)


def case_shared_memory_of_a_deleted_tensor(tag: str) -> None:
    """The receiver keeps the memory of a tensor that the sender has deleted."""
    with memsaver.region(tag, backup="host", shareable=True):
        tensor = numbered(128, 5)
    with _importer() as other:
        data = bytes(ForkingPickler.dumps(tensor))
        last = int(tensor[-1])
        del tensor
        tidy()
        other.load_pickle("x", data)
        assert other.ask("int(x[-1])") == last
        other.do("del x; gc.collect()")


def case_two_gpus_shared(tag: str) -> None:
    """Tensors from two GPUs arrive on the same GPUs, even if the receiver numbers the GPUs
    differently.
    """
    with memsaver.region(tag, backup="host", device=[0, 1], shareable=True):
        here, there = numbered(64, 1, "cuda:0"), numbered(64, 2, "cuda:1")
    with importing_process(CUDA_VISIBLE_DEVICES="1,0") as other:
        other.load("x", [here, there])
        assert other.ask("[t.device.index for t in x]") == [1, 0]
        assert other.ask("[int(t[-1]) for t in x]") == [int(here[-1]), int(there[-1])]
    with importing_process(CUDA_VISIBLE_DEVICES="0") as other:
        other.load("x", here)
        with raises(ImportFailed):
            other.load("y", there)
