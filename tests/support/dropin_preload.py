"""Code shared by the tests of processes that preload torch_memory_saver's library."""

import sysconfig

from repository import TESTS

FIXTURES = TESTS / "fixtures" / "preload"
LIBRARIES = [
    f"torch_memory_saver_hook_mode_preload{suffix}.abi3.so" for suffix in ("", "_cu12", "_cu13")
]
CC = (sysconfig.get_config_var("CC") or "cc").split()

# The beginning of a child's code.
CHILD = """
from child import Caller
caller = Caller("caller.so")
assert caller.lib is not None

def filled(byte, nbytes=3 * MIB):
    import ctypes
    pointer = caller.malloc(nbytes)
    assert pointer, caller.status
    ctypes.memset(pointer, byte, nbytes)
    return (ctypes.c_char * nbytes).from_address(pointer)

def has(array, byte):
    return bytes(array) == bytes([byte]) * len(array)
"""
