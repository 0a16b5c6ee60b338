"""Tests the device of a region on the simulated driver, without torch."""

import pytest

import memsaver
from memsaver import simulator

TWO = {"MEMSAVER_SIM_DEVICES": 2, "MEMSAVER_SIM_MEMORY": "1GiB"}


def test_memory_lies_on_the_regions_device(run_python):
    run_python(
        """
        import memsaver, torch
        from memsaver import simulator

        def devices_of(tag):
            return [row.device for row in memsaver.stats()[tag] if row.allocated_bytes]

        for number, named in enumerate([1, "cuda:1", torch.device("cuda", 1), [1], (1, 1)]):
            with memsaver.region(f"t{number}", device=named):
                kept = [simulator.buffer(4 << 20), simulator.empty(1 << 20)]
            assert devices_of(f"t{number}") == [1], named

        @memsaver.region("decorated", device=1)
        def make():
            with memsaver.region("inner"):
                inner = simulator.buffer(4 << 20)
            return inner, simulator.buffer(4 << 20)

        made = make()
        assert devices_of("inner") == [0] and devices_of("decorated") == [1]
        """,
        with_torch=True,
        **TWO,
    )


def test_memory_of_other_devices_is_refused(run_python):
    run_python(
        """
        import memsaver
        from memsaver import simulator
        from refusals import raises

        with memsaver.region("t", device=1):
            text = raises(memsaver.InvalidStateError, simulator.buffer, 4096, 0)
            assert "not for device 0" in text, text
        with memsaver.region("t", device=[0, "cuda:1"]):
            kept = [simulator.buffer(4096, 0), simulator.buffer(4096, "cuda:1")]
        for anything in (None, "cuda"):
            with memsaver.region("t", device=anything):
                kept += [simulator.buffer(4096), simulator.buffer(4096, 1)]
        assert {row.device: row.allocations for row in memsaver.stats()["t"]} == {0: 3, 1: 3}
        """,
        **TWO,
    )


WRONG = [7, "cuda:9", "banana", [0, 5], -1, 1.5, "cpu", "cuda:01", True, [], "", [None], b"cuda"]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_invalid_devices_are_rejected(sim, tag, wrong):
    name = tag()
    with pytest.raises(memsaver.ConfigError, match="device"), memsaver.region(name, device=wrong):
        raise AssertionError("it was entered")
    with pytest.raises(memsaver.UnknownTagError):
        memsaver.state(name)  # the attempt has created no tag
    if not isinstance(wrong, list):
        with memsaver.region(name), pytest.raises(memsaver.ConfigError, match="device"):
            simulator.buffer(4096, device=wrong)


def test_torchs_other_devices_are_refused(sim, tag):
    torch = pytest.importorskip("torch")
    for wrong in ("cpu", "meta", "cuda:3"):
        with pytest.raises(memsaver.ConfigError, match="device"):
            memsaver.region(tag(), device=torch.device(wrong)).__enter__()
