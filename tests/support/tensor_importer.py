"""A process that imports tensors; it reads commands from stdin and writes answers to stdout.

`importing_process` starts this process. Commands and answers are lines of JSON.
"""

import base64
import gc
import json
import os
import pickle
import sys

import torch

import memsaver
from memsaver._memory.sharing import (
    importing,  # noqa: F401 - a test leaves no descriptor for a later import of the module
    peers,
)

names = {"torch": torch, "memsaver": memsaver, "peers": peers, "gc": gc, "os": os}
print("ready", flush=True)
for line in sys.stdin:
    kind, name, text = json.loads(line)
    try:
        if kind == "load":
            names[name] = pickle.loads(base64.b64decode(text))
            answer = None
        elif kind == "do":
            exec(text, names)
            answer = None
        else:
            answer = eval(text, names)
        reply = {"answer": answer}
    except BaseException as error:
        reply = {"error": type(error).__name__, "text": str(error)}
        del error
    print(json.dumps(reply), flush=True)
