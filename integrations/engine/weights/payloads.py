"""Opens another process's tensors from serialized text.

The tensors are in CUDA memory, in shared host memory, or in shareable regions of the other process.

The text is a pickle. Unpickling calls only the functions that rebuild tensors, so a text can open
memory but do nothing else.
"""

from __future__ import annotations

import base64
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

from memsaver._memory.sharing.importing import rebuild_named
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError, SharingError

from ..errors import EngineError
from .writes import Named

__all__ = ["DEVICE_ARGUMENT", "index_of", "named_tensors"]

# The position of the device in the arguments of torch's function that rebuilds a CUDA tensor.
DEVICE_ARGUMENT = 6

_ALLOWED = {
    "torch.multiprocessing.reductions": (
        "rebuild_cuda_tensor",
        "rebuild_storage_fd",
        "rebuild_storage_filename",
        "rebuild_tensor",
        "rebuild_typed_storage",
    ),
    "torch.storage": ("TypedStorage", "UntypedStorage"),
    "multiprocessing.resource_sharer": ("DupFd",),
    rebuild_named.__module__: (rebuild_named.__name__,),
    "types": ("SimpleNamespace",),
}


def named_tensors(text: str) -> Named:
    """Return a serialized payload's named tensors, which may be views of one block of memory.

    Tensors of a shareable region prevent its tag from being paused until they are deleted.

    The tensors may be on a GPU that this process uses for the first time. Because that GPU writes
    into the memory of tags, it receives access to all tags.

    Raises:
        ConfigError: the tensors' GPU is not visible to this process.
        SharingError: the tensors of a shareable region cannot be mapped.
        EngineError: the text is malformed, or contains anything but tensors.
    """
    try:
        value = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
        if isinstance(value, dict):
            memory = value["flattened_tensor"]
            named = [
                (one.name, memory[one.start_idx : one.end_idx].view(one.dtype).view(one.shape))
                for one in value["metadata"]
            ]
        else:
            named = [(str(name), tensor) for name, tensor in value]
        is_on_gpu = any(tensor.is_cuda for _, tensor in named)
    except (ConfigError, SharingError):
        raise
    except Exception as error:
        raise EngineError(
            f"the tensors cannot be opened ({type(error).__name__}: {error})"
        ) from error
    if is_on_gpu:
        _C.refresh_peers()
    return named


def index_of(uuid: str) -> int | None:
    """Return the index of a GPU in this process, or None if the GPU is not visible to it."""
    import torch

    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    return None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype) or value in (torch.Size, torch.Tensor):
            return value
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not rebuild a tensor")
        found = super().find_class(module, name)
        return functools.partial(_rebuild, found) if name == "rebuild_cuda_tensor" else found


def _rebuild(rebuild: Callable[..., Any], *arguments: Any) -> Any:
    """Rebuild a tensor with torch's function, after converting a GPU's UUID to its index."""
    at = DEVICE_ARGUMENT
    if len(arguments) <= at or not isinstance(arguments[at], str):
        return rebuild(*arguments)
    index = index_of(arguments[at])
    if index is None:
        raise ConfigError(
            f"GPU {arguments[at]} of another rank is not visible to this rank, which must use "
            "memory there: let CUDA_VISIBLE_DEVICES name all GPUs of the group"
        )
    return rebuild(*arguments[:at], index, *arguments[at + 1 :])
