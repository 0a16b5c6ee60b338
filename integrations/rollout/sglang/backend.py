"""SGLang as the engine of `memsaver.integrations.rollout`: an engine of this process, or a server.

What both ask for is the same, and stands in `_Backend`; the two kinds say how it gets there. For
SGLang 0.5.11 and newer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from memsaver.errors import ConfigError
from memsaver.integrations.rollout.backend import PauseMode, Request, Sample
from memsaver.integrations.rollout.sglang.samples import payload_of, sample_of
from memsaver.integrations.rollout.sglang.weights import WeightCalls
from memsaver.integrations.sglang import versions
from memsaver.integrations.sglang.engines import LocalEngine, ServedEngine
from memsaver.integrations.sglang.engines import connect as link_to
from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.fields import Fields, is_whole
from memsaver.integrations.sglang.sleep import SleepController
from memsaver.timeouts import check_timeout

__all__ = ["LocalBackend", "ServedBackend", "backend_of"]

_ABORT_SECONDS = 5.0  # to abort what took too long, beside the time that it had
_PAUSE_MODES = ("abort", "retract", "in_place")


def backend_of(
    engine: Any, *, api_key: str | None = None, timeout: float = 60.0
) -> LocalBackend | ServedBackend:
    """The backend over an engine.

    Args:
        engine: an `sglang.Engine` of this process, which has `skip_tokenizer_init=True`, or a
            server's URL.
        api_key: what the server asks for, its admin key where it has one.
        timeout: seconds that finding out about the engine may take.

    Raises:
        ConfigError: `engine` is neither, it detokenises, its version is not supported, or the
            address, the key or the timeout is invalid. No message contains the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed
            (`pip install "memsaver[http]"`).
        EngineError: the engine cannot be reached in time.
    """
    link = link_to(engine, api_key)
    if isinstance(link, ServedEngine):
        return ServedBackend(link, timeout)
    return LocalBackend(link, timeout)


class _Backend(WeightCalls):  # type: ignore[misc]  # its base is Any to mypy
    """See `rollout.backend.Backend`.

    Args:
        link: how to talk to the engine.
        timeout: seconds that finding out about it may take.
    """

    def __init__(self, link: LocalEngine | ServedEngine, timeout: float) -> None:
        check_timeout(timeout)
        server_args = self._server_args(timeout)
        self.tp_size = _ranks(server_args, "tp_size")
        self.other_ranks = _other_ranks(server_args)
        _check_version(server_args.get("version"))
        self.control = SleepController(link, timeout=timeout)

    def generate(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """See `Backend`."""
        if not requests:
            return []
        payload = payload_of(requests)
        with self.control.request():
            try:
                outputs = self._generate(payload, timeout)
            except BaseException:
                with contextlib.suppress(EngineError):
                    self._abort(payload["rid"], _ABORT_SECONDS)
                raise
        return [sample_of(output) for output in outputs]

    def pause_generation(self, mode: PauseMode, timeout: float) -> None:
        """See `Backend`."""
        if mode not in _PAUSE_MODES:
            raise ConfigError(f"a mode is one of {', '.join(_PAUSE_MODES)}, not {mode!r}")
        self._ask("pause_generation", {"mode": mode}, timeout)

    def continue_generation(self, timeout: float) -> None:
        """See `Backend`."""
        self._ask("continue_generation", {}, timeout)

    def close(self) -> None:
        """See `Backend`. Whoever started the engine ends it."""

    # --- what the two kinds do in their own ways --------------------------------------------------

    def _server_args(self, timeout: float) -> Mapping[str, Any]:
        """The engine's arguments, with its "version", which may be None. Checks them."""
        raise NotImplementedError

    def _generate(self, payload: Mapping[str, Any], timeout: float) -> list[Mapping[str, Any]]:
        """What SGLang gives for the fields of a `GenerateReqInput` with several prompts."""
        raise NotImplementedError

    def _abort(self, rids: Sequence[str], timeout: float) -> None:
        """Abort requests, if they are in flight."""
        raise NotImplementedError


class LocalBackend(_Backend):
    """An `sglang.Engine` of this process.

    Args:
        link: how to talk to it.
        timeout: seconds that finding out about it may take.
        end: ends the engine, once; None where others do.
    """

    def __init__(
        self, link: LocalEngine, timeout: float = 60.0, end: Callable[[], None] | None = None
    ) -> None:
        self._link, self._end = link, end
        super().__init__(link, timeout)

    def close(self) -> None:
        """See `Backend`."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def _server_args(self, timeout: float) -> Mapping[str, Any]:
        args = self._link.engine.tokenizer_manager.server_args
        if not getattr(args, "skip_tokenizer_init", False):
            raise ConfigError(
                "the engine would turn each token into text, for nothing: start it with "
                "skip_tokenizer_init=True"
            )
        try:
            from sglang.version import __version__ as version
        except ImportError:
            version = None
        names = ("tp_size", "pp_size", "dp_size", "enable_dp_attention")
        return {**{name: getattr(args, name, None) for name in names}, "version": version}

    def _generate(self, payload: Mapping[str, Any], timeout: float) -> list[Mapping[str, Any]]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager = self._link.engine.tokenizer_manager

        async def ask() -> Any:
            return await manager.generate_request(GenerateReqInput(**payload), None).__anext__()

        outputs: list[Mapping[str, Any]] = self._link.run("a generation", ask, timeout)
        return outputs

    def _abort(self, rids: Sequence[str], timeout: float) -> None:
        manager = self._link.engine.tokenizer_manager

        async def ask() -> None:
            for rid in rids:
                manager.abort_request(rid)

        self._link.run("an abort", ask, timeout)

    def _checksums(self, timeout: float) -> Sequence[Mapping[str, Any]]:
        from sglang.srt.managers import io_struct

        manager = self._link.engine.tokenizer_manager
        if not hasattr(manager, "check_weights"):
            return ()

        async def ask() -> Any:
            return await manager.check_weights(io_struct.CheckWeightsReqInput(action="checksum"))

        done, message, rows, _ = self._link.run("a checksum", ask, timeout)
        if not done:
            raise EngineError(f"the engine refused a checksum: {message}")
        return rows or ()

    def _ask_if_known(self, name: str, timeout: float) -> None:
        if hasattr(self._link.engine.tokenizer_manager, name):
            self._ask(name, {}, timeout)

    def _ask(self, name: str, fields: Mapping[str, Any], timeout: float) -> str:
        from sglang.srt.managers import io_struct

        request = getattr(io_struct, _REQUESTS[name])(**fields)
        method = getattr(self._link.engine.tokenizer_manager, name)

        async def ask() -> Any:
            return await method(request)

        what = name.replace("_", " ")
        answer = self._link.run(what, ask, timeout)
        done, message = answer if isinstance(answer, tuple) else (True, "")
        if not done:
            raise EngineError(f"the engine refused {what}: {message}")
        return str(message)


class ServedBackend(_Backend):
    """A server at a URL, which lives on when this is closed.

    Args:
        link: how to talk to it.
        timeout: seconds that finding out about it may take.
    """

    def __init__(self, link: ServedEngine, timeout: float = 60.0) -> None:
        self._link = link
        super().__init__(link, timeout)

    def _server_args(self, timeout: float) -> Mapping[str, Any]:
        info: dict[str, Any] = self._link.info(timeout)
        if not isinstance(info.get("version"), str):
            raise EngineError("the server is not an SGLang server: it reports no version of SGLang")
        return info

    def _generate(self, payload: Mapping[str, Any], timeout: float) -> list[Mapping[str, Any]]:
        outputs = self._link.generated(payload, timeout)
        if not isinstance(outputs, list):
            said = self._link.excerpt(outputs, 200)
            raise EngineError(f"the server must return a list of samples, and returned {said!r}")
        return outputs

    def _abort(self, rids: Sequence[str], timeout: float) -> None:
        # Without this the server notices later that the client is gone.
        deadline = time.monotonic() + timeout
        for rid in rids:
            if (left := deadline - time.monotonic()) <= 0:
                return
            self._link.post("/abort_request", {"rid": rid}, left)

    def _checksums(self, timeout: float) -> Sequence[Mapping[str, Any]]:
        try:
            answer = self._link.asked("weights_checker", {"action": "checksum"}, timeout)
        except EngineError as error:
            if error.http_status == HTTPStatus.NOT_FOUND:
                return ()
            raise
        rows = answer.get("ranks") or []
        for row in rows if isinstance(rows, list) else [rows]:
            Fields(row, "a rank's checksum").text("per_gpu_checksum")
        return list(rows)

    def _ask_if_known(self, name: str, timeout: float) -> None:
        try:
            self._ask(name, {}, timeout)
        except EngineError as error:
            if error.http_status != HTTPStatus.NOT_FOUND:
                raise

    def _ask(self, name: str, fields: Mapping[str, Any], timeout: float) -> str:
        return str(self._link.asked(name, fields, timeout).get("message", ""))


# The classes of SGLang's requests, by their methods.
_REQUESTS = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
}


def _ranks(server_args: Mapping[str, Any], name: str) -> int:
    """Return a number of ranks from the engine's arguments; 1 if it is missing."""
    value = server_args.get(name)
    if value is None:
        return 1
    if not is_whole(value) or value < 0:
        raise EngineError(
            f"the engine reports {name}={str(value)[:80]!r}, which is not a number of ranks"
        )
    return int(value) or 1


def _other_ranks(server_args: Mapping[str, Any]) -> str:
    """See `WeightCalls`."""
    if (stages := _ranks(server_args, "pp_size")) > 1:
        return f"pp_size={stages}"
    # With its attention the ranks are those of the tensor-parallel group.
    replicas = _ranks(server_args, "dp_size")
    if replicas > 1 and not server_args.get("enable_dp_attention"):
        return f"dp_size={replicas}"
    return ""


def _check_version(version: str | None) -> None:
    """Raise ConfigError for an SGLang that has not what is asked for here."""
    if version is not None and versions.is_too_old(version):
        raise ConfigError(
            f"the engine is of SGLang {version}; rollouts need {versions.PLUGINS_SINCE} or newer"
        )
