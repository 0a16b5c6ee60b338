"""A call to an engine core that exits instead of answering, through vLLM's client or a fake client.

The client is synchronous. The core notices that its workers have ended, notifies its client and
exits. vLLM's client does not shut itself down in this case.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace

SECONDS = 30


def error_of_a_call(core_client: ModuleType) -> BaseException:
    """Return the error that the call raises. Fails if the call returns or does not end."""
    resources = core_client.BackgroundResources(None)
    dead = core_client.EngineCoreProc.ENGINE_CORE_DEAD

    def end() -> None:
        # In vLLM, the client's receiving thread makes this call for each message.
        with contextlib.suppress(core_client.EngineDeadError):
            resources.validate_alive([SimpleNamespace(buffer=dead)])

    client = object.__new__(core_client.SyncMPClient)
    answered: Future[None] = Future()
    answered.set_result(None)  # by another thread, at the same time
    client.resources, client.utility_results = resources, {-1: answered}
    client._numbers = itertools.count()  # of the fake, as `_send` is
    client._send_input = client._send = lambda *_: threading.Timer(0.1, end).start()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            client.call_utility("wake_up", None)
        except BaseException as error:
            errors.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(SECONDS)
    assert errors, f"the call has not ended after {SECONDS} s, or it returned"
    return errors[0]
