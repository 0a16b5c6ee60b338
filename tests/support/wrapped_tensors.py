"""`Wrapped`: a weight that contains a dense tensor and has no memory of its own."""

import torch
from torch.utils._pytree import tree_map_only

_WRAPPED_RESULTS = (torch.ops.aten.detach.default, torch.ops.aten.view.default)


class Wrapped(torch.Tensor):
    """A wrapper as in torchao's float8 training under FSDP2. Its `data_ptr()` is 0."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        result = function(*args, **kwargs)
        return Wrapped(result) if function in _WRAPPED_RESULTS else result


class Opaque(Wrapped):
    """A wrapper whose inner tensors are unknown to torch."""

    __tensor_flatten__ = None
