"""Serve the requests of children.py: python serve.py MODULE:CLASS LIBRARY SETTINGS."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from typing import Any, ClassVar


class Worker:
    """The operations of a child process: methods whose results JSON can encode.

    The first request creates the worker with the library's name and the settings.
    """

    imports: ClassVar[tuple[str, ...]] = ("torch",)  # imported at start, by all children at once


def serve(path: str, name: str, settings: dict[str, Any]) -> None:
    """Serve requests until the end of the input."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print, which must not look like a reply
    module, _, attribute = path.partition(":")
    kind: type[Any] = getattr(importlib.import_module(module), attribute)
    for wanted in kind.imports:
        with contextlib.suppress(ImportError):  # the first request reports it
            importlib.import_module(wanted)
    worker: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "ready":
                reply = {}
            else:
                if worker is None:
                    worker = kind(name, **settings)
                reply = getattr(worker, request["do"])(**request["arguments"])
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    os._exit(0)  # not every library can free paused memory at exit


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
