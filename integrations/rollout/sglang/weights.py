"""New weights for SGLang, as `memsaver.integrations.rollout.backend.Backend` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memsaver.errors import ConfigError
from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.sleep import SleepController
from memsaver.integrations.sglang.weight_checks import Order, RankCheck, checks_of, is_good

__all__ = ["WeightCalls"]


class WeightCalls:
    """The calls of a `Backend` that bring new weights, whatever way leads to the engine.

    Attributes:
        tp_size: see `Backend`.
        other_ranks: the argument of the engine by which it has ranks beside those, which could get
            no weights; or "".
        control: see there.
    """

    tp_size: int
    other_ranks: str
    control: SleepController

    def load_tensors(
        self,
        payloads: Sequence[str],
        *,
        load_format: str | None,
        flush_cache: bool,
        weight_version: str | None,
        order: Order | None = None,
        timeout: float,
    ) -> list[RankCheck]:
        """See `Backend`."""
        if len(payloads) != self.tp_size:
            raise ConfigError(
                f"the engine has {self.tp_size} ranks, and there are {len(payloads)} payloads: "
                "there must be one for each"
            )
        fields = {
            "serialized_named_tensors": list(payloads),
            **_loading(load_format, flush_cache, weight_version),
        }
        return self._load("update_weights_from_tensor", fields, order, timeout)

    def begin_update(self, timeout: float) -> None:
        """See `Backend`."""
        self._check_ranks()
        self._ask_if_known("begin_weight_update", timeout)

    def end_update(self, timeout: float) -> None:
        """See `Backend`."""
        self._ask_if_known("end_weight_update", timeout)

    def checksums(self, timeout: float) -> Sequence[str]:
        """See `Backend`."""
        rows = self._checksums(timeout)
        return [str(row["per_gpu_checksum"]) for row in rows]

    def join_group(
        self,
        address: str,
        port: int,
        *,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout: float,
    ) -> None:
        """See `Backend`."""
        self._check_ranks()
        fields = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._ask("init_weights_update_group", fields, timeout)

    def load_broadcast(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        load_format: str | None,
        flush_cache: bool,
        weight_version: str | None,
        order: Order | None = None,
        timeout: float,
    ) -> list[RankCheck]:
        """See `Backend`."""
        fields = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            **_loading(load_format, flush_cache, weight_version),
        }
        return self._load("update_weights_from_distributed", fields, order, timeout)

    def leave_group(self, group_name: str, timeout: float) -> None:
        """See `Backend`."""
        self._ask("destroy_weights_update_group", {"group_name": group_name}, timeout)

    def _check_ranks(self) -> None:
        if self.other_ranks:
            raise ConfigError(
                f"an engine with {self.other_ranks} has ranks that would get no weights: start one "
                "engine for each of them, or use tensor parallelism (tp_size)"
            )

    def _load(
        self, name: str, fields: Mapping[str, Any], order: Order | None, timeout: float
    ) -> list[RankCheck]:
        """Ask for an update, and hear what the engine's ranks say of it."""
        named = {**fields, "rid": order.text()} if order is not None else fields
        with self.control.request("update_weights"):
            try:
                checks: list[RankCheck] = checks_of(True, self._ask(name, named, timeout))
            except EngineError as error:
                # Where a rank found something wrong, SGLang tells of an update that failed.
                checks = checks_of(True, error.message)
                if is_good(checks):
                    raise
            return checks

    # --- what a backend does in its own way -------------------------------------------------------

    def _checksums(self, timeout: float) -> Sequence[Mapping[str, Any]]:
        """What SGLang says of its ranks' weights; () where it cannot."""
        raise NotImplementedError

    def _ask_if_known(self, name: str, timeout: float) -> None:
        """Make a request without arguments, if this SGLang has it: 0.5.16 lacks some."""
        raise NotImplementedError

    def _ask(self, name: str, fields: Mapping[str, Any], timeout: float) -> str:
        """Make one of SGLang's requests, by the name that its method and its path have.

        Returns:
            What SGLang says of it, "" where that is nothing.

        Raises:
            EngineError: also where SGLang answers that it did not succeed.
        """
        raise NotImplementedError


def _loading(
    load_format: str | None, flush_cache: bool, weight_version: str | None
) -> dict[str, Any]:
    return {
        "load_format": load_format,
        "flush_cache": flush_cache,
        "weight_version": weight_version,
    }
