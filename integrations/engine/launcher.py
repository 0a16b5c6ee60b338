"""Protocols for the functions of an engine's package that start an engine or create its backend.

mypy checks the packages' modules against these protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .interface import Backend
from .placement import Gpu, Placement, Sizes

__all__ = ["Connector", "Launcher", "NodeLauncher"]


class Launcher(Protocol):
    """The module `launch` of an engine's package. Its functions document their errors."""

    def sizes_of(self, arguments: Mapping[str, Any], ranks: int | None) -> Sizes:
        """Return the parallel sizes that an engine's arguments set for at most `ranks` ranks."""

    def place(
        self, gpus: Sequence[Gpu | None], dp_rank: int, sizes: Sizes | None = None
    ) -> Placement:
        """Return the placement of an engine on the GPUs of the group's ranks."""

    def policy_variables(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment variables that set an engine's policy for requests.

        Args:
            arguments: `asleep`, `asleep_wait`, `asleep_requests` and `sleep_after`; see
                `RolloutEngine.launch`.

        Raises:
            ConfigError: a value is invalid, no request would wake an engine that releases its
                memory when idle, or a variable turns the engine's plugin off.
        """

    def launch(
        self,
        placement: Placement,
        tp_size: int | None,
        arguments: Mapping[str, Any],
        timeout: float,
        variables: Mapping[str, str],
    ) -> Backend:
        """Start an engine within `timeout` seconds, with additional environment variables."""


class NodeLauncher(Launcher, Protocol):
    """The module `launch` of a package whose engines can span several hosts."""

    def launch_node(
        self,
        placement: Placement,
        tp_size: int,
        arguments: Mapping[str, Any],
        timeout: float,
        variables: Mapping[str, str],
    ) -> Callable[[], None]:
        """Start the part of an engine on another host; return a function that stops the part."""


class Connector(Protocol):
    """The module `backend` of an engine's package."""

    def backend_of(
        self, engine: Any, *, api_key: str | None = None, timeout: float = 60.0
    ) -> Backend:
        """Return the backend for an engine in this process, or for a server at a URL."""
