"""An SGLang server at a URL as an `Engine`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from memsaver.errors import ConfigError

from ..engine.errors import EngineError
from ..engine.fields import parsed
from ..engine.http import served
from ..engine.messages import Answer, SchedulerState
from .protocol import FORGIVING, REWRITTEN, states_of
from .replies import Reply, UnknownRequestError
from .unguarded import VARIABLE

__all__ = ["ServedEngine", "check_memory_saver"]

_PATHS = {"check_weights": "weights_checker"}  # by method, if the path differs from its name


def check_memory_saver(is_enabled: object) -> None:
    """Check that SGLang has a memory saver. Without one, a release succeeds but has no effect.

    Args:
        is_enabled: the value of SGLang's argument `enable_memory_saver`; None if unknown.

    Raises:
        ConfigError: the engine was started without a memory saver.
    """
    if is_enabled is False:
        raise ConfigError(
            "the engine was started without a memory saver, so its memory cannot be released: "
            "start it with enable_memory_saver=True (option --enable-memory-saver of a server)"
        )


class ServedEngine(served.ServedEngine):
    """An SGLang server at a URL. See `integrations.engine.http.served`."""

    _GENERATE = "/generate"
    _has_memory_saver: object = None  # the server's `enable_memory_saver`, if known

    def release(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """See `Engine`.

        Raises:
            ConfigError: see `check_memory_saver`, which checks the latest result of `info`, and
                `unguarded.check_release`.
        """
        check_memory_saver(self._has_memory_saver)
        try:
            self._change("/release_memory_occupation", tags, timeout, keep_weights)
        except EngineError as error:
            if VARIABLE in error.message:  # the refusal of `check_release`
                raise ConfigError(error.message) from error
            raise
        return []

    def resume(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """See `Engine`."""
        self._change("/resume_memory_occupation", tags, timeout, keep_weights)
        return []

    def _change(self, path: str, tags: Sequence[str], timeout: float, keep_weights: bool) -> None:
        rid = FORGIVING if keep_weights else REWRITTEN
        self._client.post(path, {"tags": list(tags), "rid": rid}, timeout)

    def info(self, timeout: float) -> dict[str, Any]:
        """Return the server's own report: its arguments, its version and its schedulers' states.

        Raises:
            EngineError: the server cannot be reached, or is not an SGLang server.
        """
        source = f"{self._client.address}/server_info"
        info = parsed(self._client.get("/server_info", timeout), source)
        # No message quotes the answer, because a server's arguments may contain keys.
        if not isinstance(info, dict) or "internal_states" not in info:
            raise EngineError(f"{source} did not answer like an SGLang server: no internal_states")
        self._has_memory_saver = info.get("enable_memory_saver")
        return info

    def states(self, timeout: float) -> list[SchedulerState]:
        """See `Engine`."""
        return states_of(self.info(timeout)["internal_states"])

    def flush(self, timeout: float) -> bool:
        """See `Engine`."""
        try:
            self._client.post("/flush_cache", {}, timeout)
        except EngineError as error:
            if error.http_status == HTTPStatus.BAD_REQUEST:
                return False
            raise
        return True

    def abort(self, timeout: float) -> None:
        """See `Engine`."""
        self._client.post("/abort_request", {"abort_all": True}, timeout)

    def abort_requests(self, rids: Sequence[str], timeout: float) -> None:
        """Abort as many of the requests with these ids as the time allows.

        The other requests remain on the server, which itself detects that their clients have
        disconnected.
        """
        deadline = time.monotonic() + timeout
        for rid in rids:
            if (left := deadline - time.monotonic()) <= 0:
                return
            self._client.post("/abort_request", {"rid": rid}, left)

    def arguments(self, timeout: float) -> dict[str, Any]:
        """Return the server's arguments and its version.

        Raises:
            EngineError: the server reports no version, or `info` raises this error.
        """
        info = self.info(timeout)
        if not isinstance(info.get("version"), str):
            raise EngineError("the server is not an SGLang server: it reports no version of SGLang")
        return info

    def generated(self, payload: Mapping[str, Any], timeout: float) -> Any:
        """See `served.ServedEngine`. SGLang's name for a prompt is "text"."""
        names = {"prompt": "text"}
        fields = {names.get(key, key): one for key, one in payload.items() if one is not None}
        return super().generated(fields, timeout)

    def ask(self, name: str, payload: Mapping[str, Any], timeout: float) -> Reply:
        """Send the SGLang request with this method name, and return the reply.

        Raises:
            UnknownRequestError: this version of SGLang does not have the method.
            EngineError: the server's answer does not report whether the request succeeded.
        """
        path = f"/{_PATHS.get(name, name)}"
        status, text = self._client.ask(path, payload, timeout)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self._client.check_awake(text)
        fields = _fields_in(text, required=status == HTTPStatus.OK)
        success = fields.get("success")
        if status != HTTPStatus.OK and not isinstance(success, bool):
            failed = self._client.error_for(path, status, text)
            if status == HTTPStatus.NOT_FOUND:
                raise UnknownRequestError(failed.message)
            raise failed
        message = self._client.hidden_in(str(fields.get("message", "")))
        return Reply(success is not False, message, fields.get("ranks") or ())


def _fields_in(text: str, *, required: bool) -> dict[str, Any]:
    """Return the fields of a JSON object; {} for other JSON and, unless `required`, other text.

    Raises:
        EngineError: the text is `required` to be JSON, but is not JSON.
    """
    try:
        found = parsed(text, "the server's answer")
    except EngineError:
        if required:
            raise
        return {}
    return found if isinstance(found, dict) else {}
