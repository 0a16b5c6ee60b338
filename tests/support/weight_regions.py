"""A trainer's weights in regions, for tests of engines that map these weights."""

from wrapped_tensors import Wrapped

import memsaver
from memsaver import simulator


def in_region(name, weights, **options):
    """Return copies of tensors, allocated in a region; tied tensors stay tied."""
    copies = {}
    with memsaver.region(name, backup="host", **options):
        for tensor in weights.values():
            if id(tensor) not in copies:
                copies[id(tensor)] = simulator.empty(tensor.shape, tensor.dtype).copy_(tensor)
    return {key: copies[id(tensor)] for key, tensor in weights.items()}


def shareable(name, weights):
    return in_region(name, weights, shareable=True)


def in_region_wrapped(name, weights):
    """Return wrappers around tensors in a region."""
    return {key: Wrapped(tensor) for key, tensor in in_region(name, weights).items()}


def cycle(name):
    memsaver.pause(name)
    memsaver.resume(name)
