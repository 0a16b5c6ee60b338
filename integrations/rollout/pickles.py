"""Pickles, by which the ranks of a job tell each other prompts, results and errors.

Prompts may hold whatever an engine takes, images for example. Who can write to the connections of a
job's process group can run code in its ranks, as with torch's own collectives of objects; see
SECURITY.md. Nothing else of memsaver unpickles, and nothing here comes from elsewhere.
"""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["pack", "travels", "unpack"]


def pack(value: Any) -> bytes:
    """What `unpack` makes the value of, on another rank. Raises what its pickling raises."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """What another rank of the same process group packed. Raises what making it raises."""
    return pickle.loads(data)


def travels(value: Any) -> bool:
    """Whether a value can be packed and made again, as far as this rank can tell."""
    try:
        unpack(pack(value))
    except Exception:  # its parts do not travel, or its class wants other arguments
        return False
    return True
