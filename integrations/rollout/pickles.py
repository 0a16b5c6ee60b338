"""A pickle codec for messages between the ranks of a job.

Prompts may contain any value that an engine accepts, such as images. An attacker who can write to
the connections of a job's process group can run code in its ranks. The same is true of torch's own
object collectives; see SECURITY.md. memsaver unpickles arbitrary values only in this module, and
only from these connections.
"""

from __future__ import annotations

import pickle
from typing import Any

from memsaver.distributed.messages import Codec
from memsaver.errors import MemsaverError

__all__ = ["PICKLES", "pack", "unpack"]


def pack(value: Any) -> bytes:
    """Pickle a value for `unpack` on another rank. Exceptions propagate."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """Unpickle a value from another rank of the same process group. Exceptions propagate."""
    return pickle.loads(data)


def _pack_error(error: BaseException) -> bytes:
    if not isinstance(error, MemsaverError):
        return b""
    packed = pack(error)
    unpack(packed)  # fails here if the class needs other arguments
    return packed


PICKLES = Codec(pack, unpack, True, _pack_error, unpack)
