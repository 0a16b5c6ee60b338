"""`RefusalLog`: logs the requests that a sleeping engine did not serve."""

from __future__ import annotations

import logging

__all__ = ["RefusalLog"]

_MOST_LINES = 20
_logger = logging.getLogger("memsaver.engine")


class RefusalLog:
    """Logs up to 20 different reasons while an engine is asleep, and counts the other requests.

    A burst of requests to a sleeping engine therefore produces at most 21 log lines, even if the
    reasons differ in details such as numbers of bytes.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._unlogged = 0

    def add(self, reason: str) -> None:
        """Log a warning that a request was not served.

        Args:
            reason: a text that names the operation and the released tags; see `asleep_text`.
        """
        if reason in self._reasons or len(self._reasons) >= _MOST_LINES:
            self._unlogged += 1
            return
        self._reasons.add(reason)
        _logger.warning(
            "a request was not served: %s; more such requests are only counted until everything is "
            "resumed",
            reason,
        )

    def awake(self) -> None:
        """Log how many requests were only counted. Called when no memory is released."""
        if self._unlogged:
            _logger.warning(
                "the engine is awake; %d more requests were not served while it was asleep",
                self._unlogged,
            )
        self._reasons.clear()
        self._unlogged = 0
