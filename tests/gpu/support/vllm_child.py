"""Starts one vLLM engine and runs scenarios on it; see `engine_serving`.

usage: vllm_child.py GROUP FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from engine_serving import check_plugins, serve


def start() -> Any:
    """Start the group's engine."""
    check_plugins("vLLM", ("vllm.general_plugins",))
    from vllm_engines import start

    return start(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    serve(start)
