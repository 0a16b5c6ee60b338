"""Memory in regions of the simulated driver."""

import memsaver
from memsaver import simulator


def owned(name):
    """Return the addresses of a tag's live allocations."""
    return [r.address for r in memsaver.ranges(name)]


def buffer_in(name, nbytes=4096, **options):
    with memsaver.region(name, **options):
        return simulator.buffer(nbytes)
