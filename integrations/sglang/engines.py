"""How to talk to an engine: an `sglang.Engine` of this process, or a server at a URL.

Both ask for one thing at a time and know nothing of states; `sleep.SleepController` does. Every
call but a generation is bounded by a timeout in seconds.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol

from memsaver.errors import ConfigError, InvalidStateError, MemsaverError
from memsaver.integrations.sglang.errors import EngineError, EngineTimeoutError
from memsaver.integrations.sglang.protocol import Answer, SchedulerState

__all__ = ["Engine", "LocalEngine", "ServedEngine", "connect"]

_POLL_SECONDS = 0.05


class Engine(Protocol):
    """What a controller needs of an engine.

    Errors: `EngineTimeoutError` where there is no answer in time, `EngineError` where the engine is
    gone or refuses, memsaver's own where its hooks in the schedulers tell of one.
    """

    def release(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """Release memory; what the schedulers answer, [] where that does not reach the caller."""

    def resume(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """Resume memory; answers as of `release`."""

    def states(self, timeout: float) -> list[SchedulerState]:
        """How the schedulers are, one for each data-parallel rank; [] without memsaver's hooks."""

    def flush(self, timeout: float) -> bool:
        """Flush the prefix cache; False where requests are in flight, and nothing was done."""

    def abort(self, timeout: float) -> None:
        """Abort all requests; they may take a moment to end."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, as `sglang.Engine.generate`. Not bounded."""


def connect(engine: Any, api_key: str | None = None) -> Engine:
    """The way to talk to `engine`.

    Args:
        engine: an `sglang.Engine`, or the URL of an SGLang server; or what this returned for one.
        api_key: what a server asks for (its admin key, where it has one).

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(engine, LocalEngine | ServedEngine):
        return engine
    if isinstance(engine, str):
        if not engine.startswith(("http://", "https://")):
            raise ConfigError(f"a server's URL starts with http:// or https://, not {engine!r}")
        return ServedEngine(engine, api_key)
    missing = [
        name for name in ("loop", "tokenizer_manager", "generate") if not hasattr(engine, name)
    ]
    if missing:
        raise ConfigError(
            f"neither an sglang.Engine nor a URL: {type(engine).__name__} has no `{missing[0]}`"
        )
    return LocalEngine(engine)


def _scheduler_states(internal_states: Sequence[Mapping[str, Any]]) -> list[SchedulerState]:
    if not internal_states or any("memsaver" not in state for state in internal_states):
        return []
    return [SchedulerState.from_fields(state["memsaver"]) for state in internal_states]


class LocalEngine:
    """An `sglang.Engine` of this process. Any thread, but none inside an event loop.

    Its calls run on the engine's event loop, which one thread can drive at a time. While another
    one does (it generates, say), that thread runs them; generations take turns.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._driving = threading.Lock()  # held by the thread that drives the loop, or is about to

    @property
    def engine(self) -> Any:
        """The `sglang.Engine`."""
        return self._engine

    def release(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """See `Engine`."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput as Request

        request = Request(tags=list(tags))
        ask = self._engine.tokenizer_manager.release_memory_occupation
        return self.run("a release", lambda: ask(request, None), timeout) or []

    def resume(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """See `Engine`."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput as Request

        request = Request(tags=list(tags))
        ask = self._engine.tokenizer_manager.resume_memory_occupation
        return self.run("a resume", lambda: ask(request, None), timeout) or []

    def states(self, timeout: float) -> list[SchedulerState]:
        """See `Engine`."""
        ask = self._engine.tokenizer_manager.get_internal_state
        return _scheduler_states(self.run("its state", ask, timeout))

    def flush(self, timeout: float) -> bool:
        """See `Engine`."""
        ask = self._engine.tokenizer_manager.flush_cache
        return bool(self.run("a flush", ask, timeout).success)

    def abort(self, timeout: float) -> None:
        """See `Engine`."""

        async def ask() -> None:
            self._engine.tokenizer_manager.abort_request(abort_all=True)

        self.run("an abort", ask, timeout)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine`."""
        with self._driving:
            result = self._engine.generate(*args, **kwargs)
        return self._stream(iter(result)) if kwargs.get("stream") else result

    def _stream(self, items: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while True:
            with self._driving:  # not between items, which may be long
                item = next(items, end)
            if item is end:
                return
            yield item

    def run(self, what: str, ask: Callable[[], Coroutine[Any, Any, Any]], timeout: float) -> Any:
        """What `ask` returns on the engine's event loop.

        Args:
            what: the call in words, for errors.
            ask: makes the coroutine.
            timeout: seconds; then it is cancelled.

        Raises:
            EngineTimeoutError: it did not return in time.
            EngineError: the engine's processes ended, or it raised; memsaver's errors stay theirs.
            InvalidStateError: this is an event loop's thread.
        """
        loop: asyncio.AbstractEventLoop = self._engine.loop
        if _is_in_event_loop():
            raise InvalidStateError(
                "the controller cannot wait inside an event loop: call it by "
                "`await asyncio.to_thread(...)`"
            )
        if loop.is_closed():
            raise EngineError("the engine was shut down")
        if ended := self._ended():
            raise EngineError(f"the engine is dead: {ended}")
        future = asyncio.run_coroutine_threadsafe(ask(), loop)
        self._drive(loop, future, time.monotonic() + timeout)
        if not future.done():
            future.cancel()
            if ended := self._ended():
                raise EngineError(f"the engine died before it answered {what}: {ended}")
            raise EngineTimeoutError(
                f"the engine did not answer {what} within {timeout:g} s; it may be dead, or busy"
            )
        try:
            return future.result()
        except MemsaverError:
            raise
        except Exception as error:
            raise EngineError(
                f"the engine failed at {what}: {type(error).__name__}: {error}"
            ) from error

    def _drive(
        self,
        loop: asyncio.AbstractEventLoop,
        future: concurrent.futures.Future[Any],
        deadline: float,
    ) -> None:
        """Wait until `future`, which runs on `loop`, is done, or `deadline` is over.

        No longer than the engine's processes live. Another thread may drive the loop when this
        begins, or later, or stop doing so.
        """

        async def watch() -> None:
            answer = asyncio.wrap_future(future)
            while not (answer.done() or self._ended()) and time.monotonic() < deadline:
                await asyncio.wait([answer], timeout=min(_POLL_SECONDS, _left(deadline)))
            if answer.done() and not answer.cancelled():
                answer.exception()  # else asyncio logs it as one that nobody asked for

        while not (future.done() or loop.is_closed()) and time.monotonic() < deadline:
            if self._ended():
                return
            if loop.is_running() or not self._driving.acquire(blocking=False):
                concurrent.futures.wait([future], min(_POLL_SECONDS, _left(deadline)))
                continue
            watching = watch()
            try:
                loop.run_until_complete(watching)
            except RuntimeError:  # somebody who knows nothing of this was faster
                watching.close()
                time.sleep(0.001)
            finally:
                self._driving.release()

    def _ended(self) -> str:
        """Which of the engine's processes ended, in words; "" where they live or are not known."""
        watchdog = getattr(self._engine.tokenizer_manager, "_subprocess_watchdog", None)
        for process in getattr(watchdog, "_processes", ()):
            if not process.is_alive():
                return f"its process {process.pid} ended with status {process.exitcode}"
        return ""


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


class ServedEngine:
    """An SGLang server at a URL. Any thread. Goes there directly, past what proxies are set."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def release(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """See `Engine`."""
        self.post("/release_memory_occupation", {"tags": list(tags)}, timeout)
        return []

    def resume(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """See `Engine`."""
        self.post("/resume_memory_occupation", {"tags": list(tags)}, timeout)
        return []

    def states(self, timeout: float) -> list[SchedulerState]:
        """See `Engine`."""
        text = self.get("/server_info", timeout)
        try:
            return _scheduler_states(json.loads(text)["internal_states"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{self._url}/server_info is not what an SGLang server says: {text[:200]!r}"
            ) from error

    def flush(self, timeout: float) -> bool:
        """See `Engine`."""
        try:
            self.post("/flush_cache", {}, timeout)
        except EngineError as error:
            if error.http_status == http.client.BAD_REQUEST:
                return False
            raise
        return True

    def abort(self, timeout: float) -> None:
        """See `Engine`."""
        self.post("/abort_request", {"abort_all": True}, timeout)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As `sglang.Engine.generate`, with JSON for what it takes and gives; no streams."""
        if kwargs.get("stream"):
            raise ConfigError("a controller over a URL does not stream: ask the server itself")
        if len(args) > 1:
            raise ConfigError("over a URL, pass what comes after the prompt by name")
        payload = {name: value for name, value in kwargs.items() if value is not None}
        prompt = payload.pop("prompt", args[0] if args else None)
        if prompt is not None:
            payload["text"] = prompt
        return json.loads(self.post("/generate", payload, None))

    def get(self, path: str, timeout: float | None) -> str:
        """What the server answers to a GET; errors as of `post`."""
        return self._request("GET", path, None, timeout)

    def post(self, path: str, payload: Mapping[str, Any], timeout: float | None) -> str:
        """What the server answers to a POST of JSON.

        Raises:
            EngineError: it refuses (`http_status`), or cannot be reached.
            EngineTimeoutError: there was no answer for `timeout` seconds; None waits for ever.
        """
        return self._request("POST", path, json.dumps(payload).encode(), timeout)

    def _request(self, method: str, path: str, body: bytes | None, timeout: float | None) -> str:
        url = self._url + path
        request = urllib.request.Request(url, body, self._headers, method=method)
        try:
            with self._open(request, timeout=timeout) as response:
                return str(response.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            failed = EngineError(f"{url} answered {error.code}: {_body(error)}")
            failed.http_status = error.code
            raise failed from error
        except TimeoutError as error:
            raise self._timeout(url, timeout) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._timeout(url, timeout) from error
            raise EngineError(f"{url} cannot be reached: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"{url} ended the connection ({type(error).__name__}: {error}); "
                "the server may be dead"
            ) from error

    def _timeout(self, url: str, timeout: float | None) -> EngineTimeoutError:
        return EngineTimeoutError(f"{url} did not answer within {timeout or 0.0:g} s")


def _body(error: urllib.error.HTTPError) -> str:
    """What a server says of an error, SGLang's JSON or not."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        told = json.loads(text)
        # Of an update that failed it says so, in full: it may have to be understood.
        return str(told["message"] if "success" in told else told["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:1000] or str(error.reason)
