"""A route of a vLLM server through which a client detects memsaver's plugin in the engine.

The route exists only if the server has the route /collective_rpc, through which the client makes
its calls. The server has that route only with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import memsaver

from ..engine import hooking
from .protocol import ROUTE

__all__ = ["install"]


def install(module: Any) -> None:
    """Add the route to the router of /collective_rpc. Idempotent."""
    hooking.around(module, "attach_router", _attach_router)


def _attach_router(original: Callable[..., None], app: Any) -> None:
    original(app)
    app.add_api_route(ROUTE, _describe, methods=["GET"])


async def _describe() -> dict[str, str]:
    return {"memsaver": memsaver.__version__}
