"""The route of a vLLM server that shows a client that the engine has memsaver's plugin.

It exists only beside the server's /collective_rpc, through which the client makes its calls, so
only with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import functools
from typing import Any

import memsaver

from .protocol import ROUTE

__all__ = ["install"]


def install(module: Any) -> None:
    """Add the route to the router of /collective_rpc. Idempotent."""
    original = module.attach_router
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def attach_router(app: Any) -> None:
        original(app)
        app.add_api_route(ROUTE, _describe, methods=["GET"])

    module.attach_router = attach_router


async def _describe() -> dict[str, str]:
    return {"memsaver": memsaver.__version__}
