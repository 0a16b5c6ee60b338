"""The `Engine` for a `vllm.LLM` or an `AsyncLLM` in this process, or for a server at a URL."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from memsaver._runtime.background import start_daemon
from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.native import _C
from memsaver._runtime.timeouts import check_timeout, seconds_until
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError

from ..engine import blocking, held
from ..engine.errors import EngineAsleepError, EngineTimeoutError
from ..engine.interface import GENERATION_SECONDS, Request, Sample
from ..engine.local_calls import check_call, result_of
from ..engine.locks import late_generation, locked
from ..engine.loops import check_outside_loop, settle
from ..engine.outputs import request_ids
from ..engine.refusals import refused
from .admissions import VllmAdmission
from .async_engine import AsyncEngine
from .blocking_admissions import admission_of
from .calls import MODEL, Need, need_of
from .link import Link
from .local import ERRORS, Local, has_plugin
from .samples import prompt_of, sample_of, sampling_of
from .served import ServedEngine

__all__ = ["AsyncEngine", "LocalEngine", "ServedEngine", "connect"]

Result = TypeVar("Result")

_ABORT_SECONDS = 5.0  # to abort a generation, after the generation's own timeout
_GENERATION = Need(MODEL, "generate")
_POLL_SECONDS, _QUERY_SECONDS = 0.02, 1.0  # intervals in `_wait_for_wake_up`


def connect(engine: Any, api_key: str | None = None) -> Link:
    """Return the object through which `engine` is called.

    Args:
        engine: a `vllm.LLM`, an `AsyncLLM`, the URL of a vLLM server, or the result of an earlier
            call of this function.
        api_key: the server's API key.

    Raises:
        ConfigError: `engine` is of another type, or the URL or the key is invalid. The message
            contains neither the URL nor the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed.
    """
    if isinstance(engine, str):
        return ServedEngine(engine, api_key)
    if isinstance(engine, Link):
        return engine
    if hasattr(engine, "llm_engine"):
        return LocalEngine(engine)
    if all(hasattr(engine, name) for name in ("engine_core", "pause_generation", "output_handler")):
        return AsyncEngine(engine)
    raise ConfigError(
        f"the engine must be a vllm.LLM, an AsyncLLM or a server's URL, not {type(engine).__name__}"
    )


class LocalEngine(Local):
    """A `vllm.LLM` in this process. Any thread.

    An LLM runs one call at a time, so a call waits until another thread's call ends. During a
    generation by `samples`, other calls can run between vLLM's steps and while a request waits for
    a wake-up. Only a pause must wait until the generation ends. If vLLM runs its engine core in
    this process, calls cannot be interrupted, and their timeouts are checked only afterwards.

    Args:
        engine: the LLM.
    """

    def __init__(self, engine: Any) -> None:
        self._llm = engine
        self._engine = engine.llm_engine
        self._busy = threading.Lock()  # during a call; released by the thread that runs it
        self._generating = threading.Lock()
        # The thread of each call that may own a lock or wait for one.
        self._callers: list[int] = []
        self._aborted = False  # whether the generation in progress must end

    @property
    def engine(self) -> Any:
        """The `vllm.LLM`."""
        return self._llm

    def call(self, name: str, arguments: Mapping[str, Any], timeout: float) -> Any:
        """See `Link`."""
        llm = self._llm
        if name == "abort":
            self._aborted = self._generating.locked()
            if not self._aborted:
                self.run(name, self._abort, timeout)
            return None
        calls: dict[str, Callable[[], Any]] = {
            "sleep": lambda: llm.sleep(**arguments),
            "wake_up": lambda: llm.wake_up(**arguments),
            "reset_prefix_cache": lambda: llm.reset_prefix_cache(**arguments),
            "reset_mm_cache": lambda: llm.reset_mm_cache(),
            "pause": lambda: llm.sleep(0, arguments["mode"]),
            "unpause": lambda: llm.wake_up(["scheduling"]),
        }
        with self._no_generation(timeout) if name == "pause" else contextlib.nullcontext():
            return self.run(name, calls[name], timeout)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine`. The arguments and results are those of `vllm.LLM.generate`.

        Args:
            args: the arguments.
            kwargs: the keyword arguments, and `timeout`, the limit in seconds on the wait for other
                threads' calls (one hour by default).

        Raises:
            ConfigError: the timeout is not a positive number.
            EngineTimeoutError: another thread's call did not end in time.
            InvalidStateError: this thread is already making a call to the engine.
        """
        timeout = kwargs.pop("timeout", GENERATION_SECONDS)
        check_outside_loop()
        if threading.get_ident() in self._callers:
            raise InvalidStateError(
                "the engine cannot generate inside another call of the same thread (for example, "
                "in a finalizer or a signal handler): generate after that call"
            )
        with self._no_generation(timeout) as left:
            self._wait_for_wake_up(_GENERATION, timeout, time.monotonic() + left())
            with self._only_call("a generation", left()):
                return self._llm.generate(*args, **kwargs)

    def rpc(self, method: str, arguments: Sequence[Any], timeout: float) -> list[Any]:
        """See `Link`."""
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        self._wait_for_wake_up(need_of(method), timeout, deadline)
        return super().rpc(method, arguments, seconds_until(deadline))

    def samples(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """See `Link`."""
        deadline = time.monotonic() + timeout
        with self._no_generation(timeout):
            self._aborted = False
            self._wait_for_wake_up(_GENERATION, timeout, deadline, may_abort=True)
            if self._aborted:
                return [sample_of(None) for _ in requests]
            ids = request_ids(len(requests))
            try:
                return self._generated(requests, ids, deadline, timeout)
            except BaseException:
                # A step that is still running owns `_busy`, and may end after the deadline.
                with contextlib.suppress(MemsaverError):
                    self.run("an abort", lambda: self._engine.abort_request(ids), _ABORT_SECONDS)
                raise

    def _generated(
        self, requests: Sequence[Request], ids: Sequence[str], deadline: float, timeout: float
    ) -> list[Sample]:
        def add() -> None:
            for rid, request in zip(ids, requests, strict=True):
                self._engine.add_request(rid, prompt_of(request), sampling_of(request))

        found: dict[str, Any] = {}
        self.run("a generation", add, seconds_until(deadline))
        while len(found) < len(ids):
            if time.monotonic() >= deadline:
                raise EngineTimeoutError(f"the engine did not generate within {timeout:.3g} s")
            if self._aborted:
                self.run("an abort", self._abort, seconds_until(deadline))
            outputs = self.run("a generation", self._step, seconds_until(deadline))
            found |= {one.request_id: one for one in outputs if one.finished}
            if not self._engine.output_processor.has_unfinished_requests():
                break
        return [sample_of(found.get(rid)) for rid in ids]

    def _step(self) -> list[Any]:
        if not self._engine.output_processor.has_unfinished_requests():
            return []
        return list(self._engine.step())

    def _abort(self) -> None:
        self._engine.abort_request(self.unfinished(), internal=True)

    def _wait_for_wake_up(
        self, need: Need | None, timeout: float, deadline: float, *, may_abort: bool = False
    ) -> None:
        """With the policy "wait", wait until another caller has woken the tags that are needed.

        This wait must precede vLLM's call, although that call applies the policy itself: it would
        wait while this thread holds the lock `_busy`, so no other thread could wake the engine.
        """
        if need is None or not has_plugin():
            return
        admission = admission_of(self._engine)
        if admission is None or admission.policy.when_asleep != "wait":
            return
        query_at, last = 0.0, time.monotonic() + admission.policy.wait_seconds
        query = functools.partial(_query, admission, need)
        while need.tags & admission.released and not (may_abort and self._aborted):
            now = time.monotonic()
            if now >= deadline:
                raise EngineTimeoutError(f"no caller woke the engine up within {timeout:.3g} s")
            if now >= min(query_at, last):
                self.run("a query", functools.partial(query, now >= last), seconds_until(deadline))
                query_at = now + _QUERY_SECONDS
            else:
                time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def _no_generation(self, timeout: float) -> Iterator[Callable[[], float]]:
        """Exclude other generations; yield a function that returns the remaining seconds."""
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        more = "; to pause an engine while it generates, use an AsyncLLM"
        with (
            self._calling(),
            locked(self._generating, timeout, lambda: late_generation(timeout, more)),
        ):
            yield lambda: seconds_until(deadline)

    def _only_call(self, what: str, seconds: float) -> AbstractContextManager[list[threading.Lock]]:
        def late() -> EngineTimeoutError:
            return EngineTimeoutError(
                f"another thread's call did not end within {seconds:.3g} s; {what} was not made. "
                "If this call is made in an on_pause or on_resume callback, that thread may be "
                "waiting for the callback's tag: make the call after the transition"
            )

        return locked(self._busy, seconds, late)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Record that this thread may own one of the engine's locks.

        The record ensures that nested calls do not wait for that lock.
        """
        recorded: list[int] = []
        forget = functools.partial(self._forget, recorded)
        try:
            with signals_deferred():
                recorded.append(threading.get_ident())
                self._callers.append(recorded[0])
            yield
        finally:
            _C.uninterrupted(forget, True)

    def _forget(self, recorded: list[int]) -> None:
        if recorded:
            self._callers.remove(recorded[0])

    def run(self, what: str, work: Callable[[], Result], timeout: float) -> Result:
        """See `Local`."""
        with self._calling():
            return self._run(what, work, timeout)

    def _run(self, what: str, work: Callable[[], Result], timeout: float) -> Result:
        check_call(timeout, self.death())
        deadline = time.monotonic() + timeout
        done: concurrent.futures.Future[Result] = concurrent.futures.Future()
        device = held.device()

        def work_on_device() -> Result:
            held.use_device(device)
            return work()

        with self._only_call(what, timeout) as owned:
            if self._is_in_process():
                settle(done, work_on_device)
            else:
                start = functools.partial(self._start, owned, lambda: settle(done, work_on_device))
                _C.uninterrupted(start, True)
        return result_of(done, what, seconds_until(deadline), self.death, kinds=ERRORS)

    def _start(self, owned: list[threading.Lock], work: Callable[[], None]) -> None:
        """Start a thread that runs a call and then releases the lock `_busy`.

        A finalizer on the new thread could wait for `_busy`, so none may run on that thread before
        it is recorded. No signal handler may run between these steps.
        """

        def call() -> None:
            try:
                work()
            finally:
                self._busy.release()

        start_daemon("vllm-call", call, self._calling)
        owned.clear()

    def _is_in_process(self) -> bool:
        """Return whether the engine core runs in this process, whose threads then use the GPU."""
        return hasattr(self._engine.engine_core, "engine_core")


def _query(admission: VllmAdmission, need: Need, is_last: bool) -> None:
    """Query the released tags; in the last query, raise `EngineAsleepError` for needed tags."""

    async def work() -> None:
        await admission.refresh()
        if is_last:
            await admission.admit(need.tags, need.what, deadline=0.0, reads=need.reads)

    try:
        blocking.run(work)
    except EngineAsleepError as error:
        raise refused(error) from error.__cause__
