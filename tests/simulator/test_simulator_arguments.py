"""Tests that invalid arguments of the simulator's functions raise errors with advice."""

import numpy as np
import pytest

import memsaver
from memsaver import simulator


@pytest.mark.parametrize("nbytes", [-5, "x", 1.5, None, 1 << 64, [4]])
def test_invalid_buffer_sizes_are_rejected(sim, tag, nbytes):
    with memsaver.region(tag()):
        with pytest.raises(memsaver.ConfigError, match="size in bytes"):
            simulator.buffer(nbytes)


@pytest.mark.parametrize("shape", ["x", -1, 2.5, (2, -1), (2, "3"), None, (1 << 64,), [[2]]])
def test_invalid_tensor_arguments_are_rejected(sim, tag, shape):
    pytest.importorskip("torch")
    with memsaver.region(tag()):
        with pytest.raises(memsaver.ConfigError, match="size of a shape"):
            simulator.empty(shape)
        with pytest.raises(memsaver.ConfigError, match=r"torch\.float32, not 'uint8'"):
            simulator.empty(4, dtype="uint8")


def test_sizes_of_other_kinds_are_taken(sim, tag):
    torch = pytest.importorskip("torch")
    with memsaver.region(tag()):
        assert simulator.buffer(np.int64(4096)).nbytes == 4096
        assert simulator.empty(np.int64(3)).shape == (3,)
        assert simulator.empty(torch.Size([2, 3])).shape == (2, 3)
        assert simulator.empty([]).shape == ()


def test_without_torch_the_error_gives_advice(run_python):
    run_python(
        """
        import sys
        sys.modules["torch"] = None
        import memsaver
        from memsaver import simulator
        from refusals import raises

        with memsaver.region("weights", backup="host"):
            text = raises(memsaver.NotLoadedError, simulator.empty, (1024, 1024))
            block = simulator.buffer(4096)
        assert "pip install torch" in text and "simulator.buffer" in text, text
        """
    )


def test_the_end_of_an_inner_fault_keeps_the_outer_one(sim, tag):
    with memsaver.region(tag()), simulator.fault("cuMemCreate", 2, times=0):
        with simulator.fault("cuMemUnmap", 999):
            pass
        with pytest.raises(memsaver.OutOfDeviceMemoryError):
            simulator.buffer(4096)
    with memsaver.region(tag()):
        assert simulator.buffer(4096)


@pytest.mark.parametrize(
    "arguments",
    [(3, 2), ("cuNoSuchCall", 2), ("cuMemCreate", "x"), ("cuMemCreate", 2.5), ("cuMemCreate", -1)],
)
@pytest.mark.parametrize("more", [{}, {"nth": 0}, {"nth": "1"}, {"times": -1}])
def test_invalid_faults_are_rejected(sim, arguments, more):
    with pytest.raises(memsaver.ConfigError), simulator.fault(*arguments, **more):
        pass
