"""The preloaded library's path and the expected output of the program that preloads it."""

import sysconfig
from importlib.util import find_spec
from pathlib import Path

from repository import TESTS

FIXTURES = TESTS / "fixtures" / "preload"
PACKAGE = Path(find_spec("memsaver").origin).parent
LIBRARY = PACKAGE / "libmemsaver_preload.so"
CC = (sysconfig.get_config_var("CC") or "cc").split()

SIM = {"MEMSAVER_DRIVER": "sim"}
NO_DRIVER = {"MEMSAVER_DRIVER": "/nonexistent/libcuda.so.1"}

# file: (the number that marks its pointers, the symbol version)
RUNTIMES = {
    "libcudart.so.13": (1, "libcudart.so.13"),
    "libcudart-faf08d9a.so.13": (2, "libcudart.so.13"),
    "libcudart.so.12": (3, "libcudart.so.12"),
}


def program_lines(whose):
    """Return the output of `program`; `whose` names its memory's owner, "ours" or "theirs"."""
    pair = f"0 {whose} 0"
    return [
        f"constructor {pair}",
        f"main {pair}",
        "threads 0",
        f"atexit {pair}",
        f"destructor {pair}",
    ]
