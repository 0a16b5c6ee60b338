"""The HTTP responses of a sleeping vLLM server; see `..engine.http.asleep_answers`.

`/ping` keeps vLLM's own response, because probes that restart servers use this route.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..engine import hooking
from ..engine.admission import Admission
from ..engine.http.asleep_answers import add_innermost
from .admissions import admission_of

__all__ = ["MODULES", "install"]

# The modules that build a server's application, by version: 0.33, 0.26.
MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
)
_BUILD = "build_app"
_HEALTH = ("/health",)
_ASYNC = "AsyncLLM"


def install(module: ModuleType) -> None:
    """Make a module of `MODULES` add the middleware to its applications. Idempotent."""
    if hasattr(module, _BUILD):  # in 0.33, the module with this name builds no application
        hooking.around(module, _BUILD, _build_app)


def _build_app(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    app = original(*args, **named)
    _add(app)
    return app


def _add(app: Any) -> None:
    def engine() -> Any:
        return getattr(app.state, "engine_client", None)

    def admission() -> Admission | None:
        found = engine()
        return admission_of(found) if _is_engine(found) else None

    def is_shared() -> bool:
        return int(getattr(engine(), "_client_count", 1)) > 1

    add_innermost(app, admission=admission, is_shared=is_shared, health=_HEALTH)


def _is_engine(client: Any) -> bool:
    return any(kind.__name__ == _ASYNC for kind in type(client).__mro__)
