"""A process that imports tensors and runs code on them, for tests of sharing."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

from repository import IMPORT_PATH, SUPPORT

Popen = Callable[..., "subprocess.Popen[str]"]


# Statements that fill the first 200 bytes of `x` on a stream that waits for `RUN_STREAMS`.
FILL_LATER = """
import ctypes
from memsaver import simulator
simulator.control().sim_hold_streams(1)
driver, context = ctypes.CDLL(simulator.control()._name), ctypes.c_void_p()
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuCtxSetCurrent(context)
driver.cuMemsetD8Async.argtypes = [
    ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
]
assert driver.cuMemsetD8Async(x.data_ptr(), 9, 200, None) == 0
"""
RUN_STREAMS = "simulator.control().sim_hold_streams(0)"


class ImportFailed(Exception):
    """An error that the process raised, with the name of the error's type and the error's text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class ImportingProcess:
    """A process that receives named tensors and evaluates code that uses them.

    Args:
        popen: a function that starts the process, like `subprocess.Popen`.
        environment: variables in addition to this process's variables.
    """

    def __init__(self, popen: Popen = subprocess.Popen, **environment: str) -> None:
        path = [IMPORT_PATH, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = popen(
            [sys.executable, str(SUPPORT / "tensor_importer.py")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"
        self.pid = self.process.pid

    def load(self, name: str, value: Any) -> None:
        """Send a value with `torch.multiprocessing` and bind the value to a name in the process."""
        self.load_pickle(name, dumped(value))

    def load_pickle(self, name: str, data: bytes) -> None:
        self._call("load", name, base64.b64encode(data).decode())

    def do(self, statements: str) -> None:
        self._call("do", "", statements)

    def ask(self, expression: str) -> Any:
        return self._call("ask", "", expression)

    def begin(self, statements: str) -> None:
        """Begin running statements without waiting for them to end."""
        self.process.stdin.write(json.dumps(["do", "", statements]) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        reply = json.loads(line)
        if "error" in reply:
            raise ImportFailed(reply["error"], reply["text"])
        return reply["answer"]

    def _call(self, *command: str) -> Any:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.result()

    def forget(self) -> None:
        """Delete all received values."""
        self.do("for _name in set(globals()) & set('xyz'): del globals()[_name]\ngc.collect()")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def importing_process(
    popen: Popen = subprocess.Popen, **environment: str
) -> Iterator[ImportingProcess]:
    """Start an `ImportingProcess` and stop the process at the end of the block."""
    started = ImportingProcess(popen, **environment)
    try:
        yield started
    finally:
        started.kill()
        started.process.stdin.close()
        started.process.stdout.close()


def release_shared(wait_until: Any) -> None:
    """Wait until no other process uses or maps this process's memory, and vice versa."""
    from memsaver._memory.sharing import peers, sending, sent_storages

    gc.collect()  # caught exceptions may refer to tensors
    sent_storages.forget_expired(math.inf)
    wait_until(lambda: sending.kept() == 0)
    wait_until(lambda: not any(peer.extents for peer in peers._peers.values()))


def dumped(value: Any) -> bytes:
    """Return the message that `torch.multiprocessing` sends for a value."""
    return bytes(ForkingPickler.dumps(value))


def received(value: Any) -> Any:
    """Return the object that this process receives if it sends a value to itself."""
    return pickle.loads(dumped(value))


def allocations(tag: str) -> int:
    """Return the number of live allocations in a tag."""
    from memsaver._runtime.native import _C

    return _C.stats(tag)[0]["allocations"]
