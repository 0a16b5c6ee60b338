"""The environment of a child process that uses torch."""

from __future__ import annotations

import os
from pathlib import Path

from repository import IMPORT_PATH

import memsaver


def torch_environment(expandable: bool) -> dict[str, str]:
    """Return this environment without settings for torch's allocator and memsaver.

    With it, Python finds memsaver and the tests' helper modules. With `expandable`, torch uses
    expandable segments.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MEMSAVER_")
        and name not in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    }
    root = str(Path(memsaver.__file__).resolve().parent.parent)
    paths = [root, IMPORT_PATH, env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env["PYTHONFAULTHANDLER"] = "1"
    if expandable:
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return env
