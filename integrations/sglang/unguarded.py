"""Schedulers without the guard against requests, which could crash a sleeping engine."""

from __future__ import annotations

import logging
from typing import Any

from memsaver.errors import ConfigError

from . import settings

__all__ = ["FAILED", "VARIABLE", "check_release", "has_failed", "log"]

FAILED = "_memsaver_guard_failed"  # an attribute of a scheduler without a guard: the reason
VARIABLE = "MEMSAVER_SGLANG_UNGUARDED=1"  # marks the refusal of a release in a server's response
_REASON = (
    "memsaver cannot protect a sleeping engine from requests in this version of SGLang (%s): a "
    "request that needs released memory would crash the engine"
)
_REFUSED = f"{_REASON}, so memory is released only with {VARIABLE}"
_ACCEPTED = f"{_REASON}; memory is released nevertheless, because of {VARIABLE}"
_logger = logging.getLogger("memsaver.sglang")


def has_failed(scheduler: Any) -> bool:
    """Return True if no guard could be installed, so that a request may crash a sleeping engine."""
    return hasattr(scheduler, FAILED)


def check_release(scheduler: Any) -> None:
    """Raise `ConfigError` if the scheduler has no guard and the settings require a guard."""
    if has_failed(scheduler) and not settings.releases_unguarded():
        raise ConfigError(_REFUSED % getattr(scheduler, FAILED))


def log(reason: str) -> None:
    """Log as an error that there is no guard, and whether memory is released nevertheless."""
    _logger.error(_ACCEPTED if settings.releases_unguarded() else _REFUSED, reason)
