"""A fixture of the tests of colocated sessions."""

import pytest


@pytest.fixture
def scene(sim, tag):
    """Yield a colocated session with a trainer and a fake engine, on one simulated device."""
    from colocated_scene import Scene  # imports torch

    made = Scene(tag)
    yield made
    made.__dict__.clear()  # pytest keeps the object
