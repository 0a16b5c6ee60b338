"""The part of `memsaver.integrations.engine.interface.Backend` that sends new weights to vLLM.

memsaver's plugin loads the weights in vLLM's workers (`weight_loads`), without a
weight_transfer_config. Every rank verifies the weights and reports its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memsaver.errors import ConfigError

from ..engine.backend import EngineBackend
from ..engine.errors import EngineError
from ..engine.interface import JoinRequest, SharedTensors, WeightLoad
from ..engine.weights.checks import RankCheck, is_good
from .link import Link
from .protocol import BEGIN, END, JOIN, LEAVE, LOAD, VERSION, checks_of, fields_of

__all__ = ["WeightCalls"]


class WeightCalls(EngineBackend[Link]):
    """The calls of a `Backend` that update weights. Engines with `other_ranks` are rejected.

    Attributes:
        weight_version: the version of the weights, as reported by the engine or as loaded by this
            backend; None if the version is unknown.
    """

    weight_version: str | None

    def begin_update(self, timeout: float) -> None:
        """See `Backend`."""
        if self.other_ranks:
            raise ConfigError(
                f"an engine with {self.other_ranks} has ranks that would receive no weights: start "
                "one engine for each of them, or use tensor parallelism (tensor_parallel_size)"
            )
        with self.control.request("update_weights"):
            self._on_all_ranks(BEGIN, [], timeout)

    def load_weights(self, load: WeightLoad) -> list[RankCheck]:
        """See `Backend`."""
        tensors = load.tensors
        if isinstance(tensors, SharedTensors):
            self._check_payloads(tensors)
        with self.control.request("update_weights"):
            checks = self._on_all_ranks(LOAD, [fields_of(load)], load.timeout)
        if not is_good(checks):
            return checks
        if load.flush_cache and not self.link.flush(load.timeout):
            raise EngineError(
                "the weights were loaded, but the prefix cache cannot be flushed while requests "
                'are in flight: pause the generation, except with the mode "in_place"'
            )
        if load.weight_version is not None:
            self.link.rpc(VERSION, [load.weight_version], load.timeout)
            self.weight_version = load.weight_version
        return checks

    def end_update(self, timeout: float, complete: bool = True) -> None:
        """See `Backend`."""
        self._on_all_ranks(END, [complete], timeout)

    def checksums(self, timeout: float) -> Sequence[str]:
        """Return an empty tuple.

        Checksums are compared only for engines without the plugin, and vLLM engines without the
        plugin cannot load weights.
        """
        return ()

    def join_group(self, group: JoinRequest, timeout: float) -> None:
        """See `Backend`."""
        if self.other_ranks:
            raise ConfigError(f"an engine with {self.other_ranks} cannot join a group for weights")
        self._on_all_ranks(JOIN, [asdict(group), timeout], timeout)

    def leave_group(self, name: str, timeout: float) -> None:
        """See `Backend`."""
        self._on_all_ranks(LEAVE, [name], timeout)

    def _on_all_ranks(
        self, method: str, arguments: Sequence[Any], timeout: float
    ) -> list[RankCheck]:
        """Call all ranks, and return their results; if a rank failed, raise the first failure."""
        if not self.link.has_plugin(timeout):
            raise ConfigError(
                "the engine lacks memsaver's plugin, which loads the weights in vLLM's workers: "
                "install memsaver in the engine's environment, and do not set MEMSAVER_VLLM=0"
            )
        rows = self.link.rpc(method, arguments, timeout)
        if not rows or not isinstance(rows[0], list | tuple):
            raise EngineError(f"the engine's answer to {method} has no rank's result")
        return checks_of(rows[0])
