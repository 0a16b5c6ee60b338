"""Fingerprints for comparing contents between processes, or before and after a pause."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from typing import Any

from memsaver import simulator
from memsaver._memory.regions import region
from memsaver._memory.torch_mode import torch_pools
from memsaver._runtime.native import _C
from memsaver._transitions.handles import state
from memsaver.errors import ConfigError, InvalidStateError, NotLoadedError

__all__ = ["fingerprint"]

_PIECE = 1 << 20  # bytes of a range that one native digest covers
_DIGEST = 32  # bytes of a digest


def fingerprint(*tags_or_tensors: Any) -> str:
    """Return a hex digest of the contents of tags and tensors, computed on the device.

    Experimental: this API can change in any version.

    Equal bytes have equal digests in every process and at every address. Different contents have
    different digests, except with probability 2^-128 or if they were constructed to collide.

    Args:
        tags_or_tensors: tags or CUDA tensors, hashed in argument order. The live tensors of a tag
            are hashed in address order. Any CUDA tensor is valid, even if memsaver did not allocate
            it. On the simulated driver, pass tensors in simulated memory. Non-contiguous tensors
            are copied first.

    The call waits for work already submitted to the device. The fingerprint of a tag equals the
    fingerprint of its tensors in address order.

    Raises:
        UnknownTagError: no region has ever named one of the tags.
        ConfigError: a tensor is not on a GPU, or an argument is neither a tag nor a tensor.
        InvalidStateError: one of the tags, or the tag of one of the tensors, is paused.
        DriverError: a driver call failed.
    """
    if not tags_or_tensors:
        raise ConfigError("fingerprint needs at least one tag or tensor")
    digest = hashlib.blake2b(digest_size=16, person=b"memsaver 1")
    for named in tags_or_tensors:
        if isinstance(named, str):
            _add(digest, _ranges_of_tag(named))
        else:
            with _contiguous(named) as tensor:
                _add(digest, [(tensor.data_ptr(), tensor.numel() * tensor.element_size())])
    return digest.hexdigest()


def _add(digest: Any, ranges: list[tuple[int, int]]) -> None:
    """Add each range to the digest, as its length followed by its native digests."""
    filled = [r for r in ranges if r[1]]
    pieces = memoryview(_C.fingerprint(filled) if filled else b"")
    at = 0
    for _, nbytes in ranges:
        end = at + -(-nbytes // _PIECE) * _DIGEST
        digest.update(nbytes.to_bytes(8, "little"))
        digest.update(pieces[at:end])
        at = end


def _ranges_of_tag(tag: str) -> list[tuple[int, int]]:
    if state(tag) == "paused":
        raise InvalidStateError(
            f"tag {tag!r} is paused: it has no device memory to read; compute its fingerprint "
            "before the pause, or resume it first",
            tag=tag,
        )
    ranges = _C.ranges(tag)
    pools = torch_pools(required=False)
    return pools.live_ranges(ranges) if pools is not None else ranges


@contextlib.contextmanager
def _contiguous(tensor: Any) -> Iterator[Any]:
    """Yield the tensor, or a contiguous copy on the same device."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"fingerprint takes tags and torch tensors, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ConfigError(f"fingerprint takes dense tensors, not {tensor.layout}")
    tensor = tensor.detach()
    simulated = _is_simulated()
    if tensor.numel() == 0:
        yield tensor
        return
    if not (_C.owns(tensor.data_ptr()) if simulated else tensor.is_cuda):
        raise ConfigError(
            f"fingerprint takes CUDA tensors, not one on {tensor.device}: move it to a GPU"
            + (" (here: simulator.empty, in a region)" if simulated else "")
        )
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield tensor
    elif simulated:
        with region(_tag_of(tensor.data_ptr())):
            copy = simulator.empty(tensor.shape, tensor.dtype)
        yield copy.copy_(tensor)
    else:
        yield tensor.resolve_conj().resolve_neg().contiguous()


def _tag_of(address: int) -> str:
    found = _C.locate(address)
    return str(found[0]) if found is not None else ""


def _is_simulated() -> bool:
    try:
        return simulator.active()
    except NotLoadedError:
        return False
