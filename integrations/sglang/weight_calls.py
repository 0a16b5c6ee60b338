"""Sends new weights to SGLang for `memsaver.integrations.engine.interface.Backend`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from memsaver.errors import ConfigError

from ..engine.backend import EngineBackend
from ..engine.fields import Fields
from ..engine.interface import JoinRequest, SharedTensors, WeightLoad
from ..engine.weights.checks import RankCheck, is_good, raise_failure
from .engines import LocalEngine, ServedEngine
from .protocol import INCOMPLETE, checks_in, text_of
from .replies import Reply, UnknownRequestError

__all__ = ["WeightCalls", "checks_of"]

_FORMATS = {"whole": "flattened_bucket", "engine": "direct"}  # SGLang's names for the layouts


class WeightCalls(EngineBackend[LocalEngine | ServedEngine]):
    """The calls of a `Backend` that update weights.

    The ranks in `other_ranks` receive weights only if memsaver's plugin is in the engine.

    Attributes:
        selects: whether SGLang's update requests name the models that receive the weights.
    """

    selects: bool = False

    def begin_update(self, timeout: float) -> None:
        """See `Backend`."""
        self._check_ranks(timeout)
        self._do_if_known("begin_weight_update", timeout)

    def load_weights(self, load: WeightLoad) -> list[RankCheck]:
        """See `Backend`."""
        name, fields = self._request_for(load)
        with self.control.request("update_weights"):
            return checks_of(self.link.ask(name, fields, load.timeout))

    def end_update(self, timeout: float, complete: bool = True) -> None:
        """See `Backend`."""
        fields = {} if complete else {"rid": INCOMPLETE}
        self._do_if_known("end_weight_update", timeout, **fields)

    def checksums(self, timeout: float) -> Sequence[str]:
        """See `Backend`."""
        try:
            reply = self.link.ask("check_weights", {"action": "checksum"}, timeout)
        except UnknownRequestError:
            return ()
        reply.check("a checksum")
        rows = reply.ranks if isinstance(reply.ranks, list | tuple) else [reply.ranks]
        return [Fields(row, "a rank's checksum").text("per_gpu_checksum") for row in rows]

    def join_group(self, group: JoinRequest, timeout: float) -> None:
        """See `Backend`."""
        self._check_ranks(timeout)
        fields = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self._do("init_weights_update_group", fields, timeout)

    def leave_group(self, name: str, timeout: float) -> None:
        """See `Backend`."""
        self._do("destroy_weights_update_group", {"group_name": name}, timeout)

    def _check_ranks(self, timeout: float) -> None:
        """Raise `ConfigError` if some ranks of the engine would receive no weights."""
        if not self.other_ranks:
            return
        states = self.link.states(timeout)
        if not states or any(state.update_ranks != self.tp_size for state in states):
            raise ConfigError(
                f"an engine with {self.other_ranks} has ranks that would receive no weights, "
                "because it runs without memsaver's plugin, or with an older one: install this "
                "version in the engine's environment, with enable_memory_saver=True"
            )

    def _request_for(self, load: WeightLoad) -> tuple[str, dict[str, Any]]:
        """Return the name and the fields of SGLang's request."""
        fields: dict[str, Any] = {
            "flush_cache": load.flush_cache,
            "weight_version": load.weight_version,
        }
        if load.verification is not None:
            fields["rid"] = text_of(load.verification)
        tensors = load.tensors
        if isinstance(tensors, SharedTensors):
            self._check_payloads(tensors)
            fields["serialized_named_tensors"] = list(tensors.payloads)
            is_listed = tensors.layout == "whole" and not tensors.in_bucket
            fields["load_format"] = None if is_listed else _FORMATS[tensors.layout]
            if self.selects and tensors.layout == "engine":
                fields["selector"] = "target"  # a draft model has parameters with other names
            return "update_weights_from_tensor", fields
        fields["names"] = list(tensors.names)
        fields["dtypes"] = list(tensors.dtypes)
        fields["shapes"] = [list(shape) for shape in tensors.shapes]
        fields["group_name"] = tensors.group_name
        fields["load_format"] = None  # the model's own loader loads each tensor separately
        return "update_weights_from_distributed", fields

    def _do(self, name: str, fields: Mapping[str, Any], timeout: float) -> None:
        """Send a request. Raises `EngineError` if SGLang reports a failure."""
        self.link.ask(name, fields, timeout).check(name.replace("_", " "))

    def _do_if_known(self, name: str, timeout: float, **fields: str) -> None:
        """Send a request if this version of SGLang supports it."""
        with contextlib.suppress(UnknownRequestError):
            self._do(name, fields, timeout)


def checks_of(reply: Reply) -> list[RankCheck]:
    """Return the checks of the engine's ranks from SGLang's reply to an update.

    Returns:
        The ranks' checks; [] if the engine lacks memsaver's plugin and the update succeeded.

    Raises:
        EngineError: the update failed. If a rank failed with another memsaver error, this error is
            raised instead.
    """
    checks = checks_in(reply.message)
    raise_failure(checks)
    if is_good(checks):  # otherwise the checks are the reason why SGLang reports a failure
        reply.check("the update of its weights")
    return checks
