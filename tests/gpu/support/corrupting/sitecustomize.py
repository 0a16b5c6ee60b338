"""Corrupts a model's parameter after each load, if the engine's PYTHONPATH includes this folder.

While the file that MEMSAVER_TEST_CORRUPTS names exists, each load is followed by a change to the
parameter that the file names. The change affects the parameter's last element or, if a number
follows the name, one bit of the byte with that index.
"""

import os
from pathlib import Path

FLAG = os.environ.get("MEMSAVER_TEST_CORRUPTS")

if FLAG:
    import torch

    from memsaver.integrations.engine.weights import load_check

    watched = load_check.watched

    def and_corrupted(model, named, load):
        result = watched(model, named, load)
        if Path(FLAG).exists():
            name, *byte = Path(FLAG).read_text().split()
            tensor = dict(model.named_parameters())[name].data
            if byte:
                tensor.view(-1).view(torch.uint8)[int(byte[0])] ^= 1
            else:
                tensor[-1, -1] += 1
        return result

    load_check.watched = and_corrupted
