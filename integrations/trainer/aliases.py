"""Find all references to the memory of CPU tensors, and redirect them to other memory.

Every Python tensor that uses a storage can be found and redirected to other memory. Objects that
keep the memory's address (a numpy array, a DLPack consumer) or refer to the storage object cannot
be redirected.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections import Counter, defaultdict
from typing import Any

from .holdings import gradient_of_leaf
from .references import TEMPORARY, buffers_in_use, instances_of, references_to

__all__ = ["Aliases"]

# Before Python 3.11, the evaluation stack of `offload`'s caller has one reference to the tensor
# that no function reports. One numpy array or similar object per tensor may therefore be
# overlooked.
_UNSEEN = 1 if sys.version_info < (3, 11) else 0


class Aliases:
    """The Python tensors that use the storages of given tensors, and other references.

    The search covers the local variables of all threads, and the objects that the garbage collector
    tracked when this object was created. The constructor takes about 0.1 s in a process with a
    million objects.

    The caller may refer to the tensors only from containers, and must disable torch's
    `__torch_function__` overrides.
    """

    def __init__(self, tensors: list[Any]) -> None:
        import torch

        self._tensors = tensors
        self._users: dict[int, list[Any]] = defaultdict(list)  # by the storage's id
        self._elsewhere: list[range] = []  # the addresses of the other storages in host memory
        self._gradients: set[int] = set()  # ids
        ids = set(map(_storage_id, tensors))
        for tensor in instances_of(torch.Tensor):
            self._note(tensor, ids)
        self._views: Counter[int] = Counter()  # views' references, by their base's id
        for user in itertools.chain.from_iterable(self._users.values()):
            if user._base is not None:  # conjugate and real views refer to the base twice
                self._views[id(user._base)] += 1 + user._base.is_complex()
        self._references: Counter[int] | None = None
        self._buffers: list[tuple[range, str]] | None = None

    def of(self, at: int) -> list[Any]:
        """Return the Python tensors that use the storage of the tensor at index `at`."""
        return self._users[_storage_id(self._tensors[at])]

    def obstacle(self, at: int) -> str | None:
        """Return the reason why the storage of tensor `at` cannot be moved; None if it is movable.

        The caller must not hold a reference to the storage object, because such a reference
        prevents the move.
        """
        import torch

        probe = [torch.empty(1, device="cpu")]
        storage, normal = self._tensors[at].untyped_storage(), probe[0].untyped_storage()
        if sys.getrefcount(storage) > sys.getrefcount(normal):
            return "is referred to by a storage object, which untyped_storage() returned"
        if storage.is_shared():
            return "is shared with other processes"
        users = self._users[storage._cdata]
        if _uses(storage) - _uses(normal) > len(users) - 1:
            return f"has a user that Python's collector does not track ({_who_it_may_be()})"
        addresses = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        if _meets(addresses, self._elsewhere):
            return "shares its memory with another storage, such as one created by from_dlpack"
        # True if numpy has the storage's address, or if torch did not allocate the memory.
        is_shown = not storage.resizable()
        buffer = self._buffer_over(addresses) if is_shown else None
        if buffer is not None:
            return f"shares its memory with a {buffer}"
        if any(self._is_exported(users, index, is_shown) for index in range(len(users))):
            return "is used through its address, for example by a numpy array or DLPack"
        return None

    def _note(self, tensor: Any, ids: set[int]) -> None:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if is_traceable_wrapper_subclass(tensor):
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # the tensor has no storage
        if storage._cdata in ids:
            self._users[storage._cdata].append(tensor)
        elif storage.device.type == "cpu" and storage.nbytes():
            self._elsewhere.append(range(storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        gradient = gradient_of_leaf(tensor)
        if gradient is not None:
            self._gradients.add(id(gradient))

    def _is_exported(self, users: list[Any], at: int, is_shown: bool) -> bool:
        """Return whether a reference to a tensor belongs neither to Python nor to autograd.

        A numpy array keeps alive the Python tensor from which it was created. A DLPack capsule
        keeps the underlying C++ tensor alive.
        """
        key = id(users[at])
        is_gradient = key in self._gradients
        cpp = users[at]._use_count() - 1
        if cpp > self._views[key] + is_gradient and not users[at].requires_grad:
            return True
        visible = self._visible()[key]
        python = sys.getrefcount(users[at]) - TEMPORARY
        # C++ refers to the Python object as well, in ways that differ between torch versions.
        by_cpp = _references_by_cpp() if cpp else int(is_gradient)
        return python > visible + by_cpp + _UNSEEN and (is_shown or not visible)

    def _visible(self) -> Counter[int]:
        if self._references is None:
            users = list(itertools.chain.from_iterable(self._users.values()))
            self._references = references_to(users)
        return self._references

    def _buffer_over(self, addresses: range) -> str | None:
        if self._buffers is None:
            self._buffers = buffers_in_use()
        found = (kind for place, kind in self._buffers if _meets(addresses, [place]))
        return next(found, None)


def _storage_id(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _uses(storage: Any) -> int:
    import torch

    return int(torch._C._storage_Use_Count(storage._cdata))


def _meets(addresses: range, others: list[range]) -> bool:
    return any(one.start < addresses.stop and addresses.start < one.stop for one in others)


@functools.cache
def _references_by_cpp() -> int:
    """Return the number of references from a C++ tensor to its Python tensor."""
    import torch

    tensor = torch.empty(1, device="cpu")
    before = sys.getrefcount(tensor)
    view = tensor.view(-1)
    after = sys.getrefcount(tensor)
    del view
    return after - before


def _who_it_may_be() -> str:
    if gc.get_freeze_count():
        return (
            "maybe an object made before gc.freeze(), or an autograd graph: call gc.unfreeze(), or "
            "release the graph"
        )
    return "maybe an autograd graph: release it first"
