"""Starts one SGLang engine and runs scenarios on it; see `engine_serving`.

usage: sglang_child.py GROUP FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from engine_serving import check_plugins, serve

GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")


def check_installation() -> None:
    """Raise an error if SGLang would not find memsaver's plugin."""
    check_plugins("SGLang", GROUPS)


def start() -> Any:
    """Start the group's engine."""
    check_installation()
    from sglang_engines import start

    return start(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    serve(start)
