"""The codec for what the ranks of a job send each other: pickles.

Prompts may hold whatever an engine takes, images for example. Who can write to the connections of a
job's process group can run code in its ranks, as with torch's own collectives of objects; see
SECURITY.md. Nothing else of memsaver unpickles, and nothing here comes from elsewhere.
"""

from __future__ import annotations

import pickle
from typing import Any

from memsaver.distributed.messages import Codec
from memsaver.errors import MemsaverError

__all__ = ["PICKLES", "pack", "unpack"]


def pack(value: Any) -> bytes:
    """What `unpack` makes the value of, on another rank. Raises what its pickling raises."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """What another rank of the same process group packed. Raises what making it raises."""
    return pickle.loads(data)


def _pack_error(error: BaseException) -> bytes:
    if not isinstance(error, MemsaverError):
        return b""
    packed = pack(error)
    unpack(packed)  # its class may want other arguments
    return packed


PICKLES = Codec(pack, unpack, True, _pack_error, unpack)
