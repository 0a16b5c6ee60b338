"""Tests memory that is exported as file descriptors and imported, on both drivers."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from ctypes import byref
from pathlib import Path

import pytest
from driver_values import FILE_DESCRIPTOR, PAGE, SUCCESS


@pytest.fixture
def exported(drv):
    """Yield mapped exportable memory of two pages with a descriptor: (address, handle, file)."""
    address, handle = drv.reserve(2 * PAGE), drv.create_exportable(2 * PAGE)
    drv.map(address, 2 * PAGE, handle)
    file = drv.export(handle)
    yield address, handle, file
    os.close(file)
    drv.discard(address, 2 * PAGE, handle)


def test_imported_memory_is_the_same_memory(drv, exported):
    address, _, file = exported
    drv.write(address + PAGE, b"shared")
    handle, second = drv.import_from(file), drv.reserve(2 * PAGE)
    drv.map(second, 2 * PAGE, handle)
    assert drv.read(second + PAGE, 6) == b"shared"
    drv.write(second, b"both")
    assert drv.read(address, 4) == b"both"
    drv.discard(second, 2 * PAGE, handle)


def test_importing_needs_no_memory_and_any_owner_keeps_it(drv):
    free = drv.free_bytes()
    handle = drv.create_exportable(2 * PAGE)
    file = drv.export(handle)
    imported = drv.import_from(file)
    assert drv.free_bytes() == free - 2 * PAGE
    os.close(file)
    address = drv.reserve(2 * PAGE)
    drv.map(address, 2 * PAGE, handle)
    drv.write(address, b"kept")
    drv.check("cuMemUnmap", address, 2 * PAGE)
    drv.check("cuMemRelease", handle)
    drv.map(address, 2 * PAGE, imported)
    assert drv.read(address, 4) == b"kept"
    drv.discard(address, 2 * PAGE, imported)
    if not drv.simulated:  # the simulator counts memory only for its creator
        assert drv.free_bytes() == free


def test_adjacent_mappings_get_access_in_one_call(drv, exported):
    file = exported[2]
    handles = [drv.import_from(file), drv.import_from(file)]
    address = drv.reserve(4 * PAGE)
    for number, handle in enumerate(handles):
        drv.check("cuMemMap", address + 2 * PAGE * number, 2 * PAGE, 0, handle, 0)
    assert drv.set_access(address, 4 * PAGE) == SUCCESS
    drv.write(address + 2 * PAGE, b"last")
    assert drv.read(address, 4) == b"last"
    drv.discard(address, 4 * PAGE, *handles)


def test_memory_must_be_exportable(drv):
    handle, out = drv.create(PAGE), ctypes.c_int(-1)
    assert drv.cuMemExportToShareableHandle(byref(out), handle, FILE_DESCRIPTOR, 0) != SUCCESS
    assert out.value == -1
    drv.check("cuMemRelease", handle)


def test_other_files_are_refused(drv):
    out = ctypes.c_uint64()
    with open(os.devnull) as file:
        assert drv.cuMemImportFromShareableHandle(byref(out), file.fileno(), FILE_DESCRIPTOR)


CHILD = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from driver_api import Driver
from driver_values import PAGE

drv = Driver(sys.argv[2]).start()
with socket.socket(fileno=int(sys.argv[3])) as link:
    file = socket.recv_fds(link, 1, 1)[1][0]
    handle, address = drv.import_from(file), drv.reserve(2 * PAGE)
    drv.map(address, 2 * PAGE, handle)
    assert drv.read(address, 5) == b"hello"
    drv.write(address, b"world")
    link.send(b".")
    link.recv(1)  # the memory is still mapped when the process is killed
"""


def test_another_process_maps_it_and_dies(drv, exported):
    address, _, file = exported
    drv.write(address, b"hello")
    mine, theirs = socket.socketpair()
    folder = str(Path(__file__).parent)
    with mine, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, folder, drv.path, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        socket.send_fds(mine, [b"."], [file])
        assert mine.recv(1) == b"."
        assert drv.read(address, 5) == b"world"
        child.kill()
        child.wait()
    assert drv.read(address, 5) == b"world"
