"""Who refers to the memory of CPU tensors: what the simulator can move along, and what it cannot.

Every Python tensor over a storage can be found and given other memory. Whatever has the memory's
address (a numpy array, a DLPack consumer) or the storage's object cannot.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections import Counter, defaultdict
from typing import Any

from memsaver.integrations.trainer.references import (
    TEMPORARY,
    arrays_of_numpy,
    instances_of,
    references_to,
)

__all__ = ["Aliases"]

# Before Python 3.11 the evaluation stack of the function that called `offload` refers to the tensor
# as well, which nothing shows. So one numpy array or the like that cannot be found is overlooked.
_UNSEEN = 1 if sys.version_info < (3, 11) else 0


class Aliases:
    """The Python tensors over the storages of some tensors, and what else refers to their memory.

    Knows what the garbage collector knew when this was made, and the local variables of all
    threads. Takes some 0.1 s in a process with a million objects.

    The caller refers to the tensors from containers alone, and switches torch functions off.
    """

    def __init__(self, tensors: list[Any]) -> None:
        import torch

        self._tensors = tensors
        self._users: dict[int, list[Any]] = defaultdict(list)  # by the storage's id
        self._elsewhere: list[range] = []  # the addresses of other storages
        self._gradients: set[int] = set()  # ids
        ids = set(map(_storage_id, tensors))
        for tensor in instances_of(torch.Tensor):
            self._note(tensor, ids)
        self._views: Counter[int] = Counter()  # how often views refer to their base, by its id
        for user in itertools.chain.from_iterable(self._users.values()):
            if user._base is not None:  # conjugate and real views refer to it twice
                self._views[id(user._base)] += 1 + user._base.is_complex()
        self._references: Counter[int] | None = None
        self._arrays: list[range] | None = None

    def of(self, at: int) -> list[Any]:
        """The Python tensors over the storage of the tensor with that index."""
        return self._users[_storage_id(self._tensors[at])]

    def obstacle(self, at: int) -> str | None:
        """What keeps the storage of the tensor with that index from being moved, if anything.

        Nothing else may hold the storage's object: that is one of the obstacles.
        """
        import torch

        probe = [torch.empty(1, device="cpu")]
        storage, normal = self._tensors[at].untyped_storage(), probe[0].untyped_storage()
        if sys.getrefcount(storage) > sys.getrefcount(normal):
            return "is held by a variable as a storage, which untyped_storage() returned"
        if storage.is_shared():
            return "is shared with other processes"
        users = self._users[storage._cdata]
        if _uses(storage) - _uses(normal) > len(users) - 1:
            return f"is used by no tensor that Python's collector knows ({_who_it_may_be()})"
        addresses = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        if _meets(addresses, self._elsewhere):
            return "is the memory of another storage too, such as from_dlpack makes"
        is_shown = not storage.resizable()  # numpy was given its address, or it came from outside
        if is_shown and _meets(addresses, self._numpys()):
            return "is the memory of a numpy array"
        if any(self._is_exported(users, index, is_shown) for index in range(len(users))):
            return "is used by something that has its address, such as a numpy array or DLPack"
        return None

    def _note(self, tensor: Any, ids: set[int]) -> None:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if is_traceable_wrapper_subclass(tensor):
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # it has none
        if storage._cdata in ids:
            self._users[storage._cdata].append(tensor)
        elif storage.device.type == "cpu" and storage.nbytes():
            self._elsewhere.append(range(storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        if tensor.is_leaf and tensor.grad is not None:
            self._gradients.add(id(tensor.grad))

    def _is_exported(self, users: list[Any], at: int, is_shown: bool) -> bool:
        """Whether something refers to a tensor that is neither Python's nor autograd's.

        numpy's arrays keep the Python tensor that they were made from, DLPack's capsules the C++
        tensor behind it.
        """
        key = id(users[at])
        is_gradient = key in self._gradients
        cpp = users[at]._use_count() - 1
        if cpp > self._views[key] + is_gradient and not users[at].requires_grad:
            return True
        visible = self._visible()[key]
        python = sys.getrefcount(users[at]) - TEMPORARY
        # C++ refers to the Python object as well, in ways that differ between torch's versions.
        by_cpp = _references_by_cpp() if cpp else int(is_gradient)
        return python > visible + by_cpp + _UNSEEN and (is_shown or not visible)

    def _visible(self) -> Counter[int]:
        if self._references is None:
            users = list(itertools.chain.from_iterable(self._users.values()))
            self._references = references_to(users)
        return self._references

    def _numpys(self) -> list[range]:
        if self._arrays is None:
            self._arrays = arrays_of_numpy()
        return self._arrays


def _storage_id(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _uses(storage: Any) -> int:
    import torch

    return int(torch._C._storage_Use_Count(storage._cdata))


def _meets(addresses: range, others: list[range]) -> bool:
    return any(one.start < addresses.stop and addresses.start < one.stop for one in others)


@functools.cache
def _references_by_cpp() -> int:
    """How many references to a Python tensor C++ has if another C++ tensor refers to it."""
    import torch

    tensor = torch.empty(1, device="cpu")
    before = sys.getrefcount(tensor)
    view = tensor.view(-1)
    after = sys.getrefcount(tensor)
    del view
    return after - before


def _who_it_may_be() -> str:
    if gc.get_freeze_count():
        return "one made before gc.freeze(), or a graph of autograd's: gc.unfreeze(), or let it go"
    return "a graph of autograd's, say: let it go first"
