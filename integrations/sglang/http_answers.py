"""HTTP responses of a sleeping SGLang server; see `..engine.http.asleep_answers`.

While the engine is awake, `/health` and `/health_generate` generate a token.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..engine.admission import Admission
from ..engine.http.asleep_answers import add_innermost
from .admissions import admission_of

__all__ = ["install"]

_HEALTH = ("/health", "/health_generate")


def install(module: ModuleType) -> None:
    """Add the middleware to SGLang's server module, before the server starts.

    Raises:
        AttributeError: the module does not have the expected interface.
    """
    module._global_state  # noqa: B018

    def admission() -> Admission | None:
        manager = _manager_of(module)
        return None if manager is None else admission_of(manager)

    def is_shared() -> bool:
        workers = getattr(_manager_of(module).server_args, "tokenizer_worker_num", 1)
        return isinstance(workers, int) and workers > 1

    add_innermost(module.app, admission=admission, is_shared=is_shared, health=_HEALTH)


def _manager_of(module: ModuleType) -> Any:
    return getattr(module._global_state, "tokenizer_manager", None)
