"""Tests pickling, saving and sending tensors in regions."""

from __future__ import annotations

import io
import os
import pickle
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler

import torch
from expected_errors import raises

import memsaver
from torch_cases.tensors import inside, is_numbered, numbered


def case_pickled_and_sent(tag: str) -> None:
    """Tensors can be saved only while they are mapped, and can never be sent.

    The errors contain advice, and CUDA still works afterwards.
    """
    with memsaver.region(tag, backup="host"):
        tensor = numbered(2)
        parameter = torch.nn.Parameter(numbered(1, 3).float())
    file = io.BytesIO()
    torch.save({"tensor": tensor, "parameter": parameter}, file)
    file.seek(0)
    again = torch.load(file)
    assert again["tensor"].is_cuda and torch.equal(again["tensor"], tensor)
    assert not inside(again["tensor"], tag)
    assert torch.equal(pickle.loads(pickle.dumps(parameter)), parameter)
    for state in ("mapped", "paused"):
        for sent in (tensor, tensor[5:], parameter, {"weights": [tensor]}):
            with raises(memsaver.ConfigError) as errors:
                ForkingPickler.dumps(sent)
            assert errors[0].tag == tag and "CUDA IPC" in str(errors[0])
        if state == "mapped":
            memsaver.pause(tag)
    for save in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        for saved in (tensor, parameter, {"weights": [tensor]}):
            with raises(memsaver.InvalidStateError) as errors:
                save(saved)
            assert errors[0].tag == tag
    file = io.BytesIO()
    torch.save(memsaver.backup_view(tensor), file)
    memsaver.resume(tag)
    file.seek(0)
    assert torch.equal(torch.load(file), tensor.cpu())
    assert torch.ones(4, device="cuda").sum().item() == 4
    with memsaver.disabled():
        outside = tensor.clone()
    if "expandable_segments" not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
        ForkingPickler.dumps(outside)  # follows the error's advice
    if find_spec("safetensors"):
        from safetensors.torch import load
        from safetensors.torch import save as save_tensors

        assert torch.equal(load(save_tensors({"tensor": tensor}))["tensor"], tensor.cpu())


def case_pickled_during_transitions(tag: str) -> None:
    """Pickling and saving wait for a resume or a pause that is in progress."""
    with memsaver.region(tag, backup="host"):
        large, small = numbered(2048, 5), numbered(1, 3)
    early = 0
    for save in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        going = memsaver.pause(tag, wait=False)
        early += not going.done()
        with raises(memsaver.InvalidStateError) as errors:
            save(small)
        assert errors[0].tag == tag
        going.wait()
        coming = memsaver.resume(tag, wait=False)
        early += not coming.done()
        save(small)
        again = pickle.loads(pickle.dumps({"last": small}))["last"]
        coming.wait()
        assert torch.equal(again, small) and is_numbered(large, 5)
    assert early == 4, "each transition ended before the tensor was pickled"
