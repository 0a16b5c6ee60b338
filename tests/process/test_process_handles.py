"""Tests descriptors of processes, with Python's own function and without it."""

import os
import select
import subprocess

import pytest

from memsaver._runtime.process_handles import open_process


@pytest.mark.parametrize("has_function", [True, False])
def test_a_descriptor_shows_the_end_of_its_process(monkeypatch, has_function):
    if not has_function:  # as in a Python that was built with old kernel headers
        monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        descriptor = open_process(child.pid)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(0) == []
        child.kill()
        assert poll.poll(30_000) != []
        os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        open_process(child.pid)
