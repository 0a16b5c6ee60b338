"""Tests `memsaver doctor`'s findings about the driver and its devices."""

import re

import pytest
from doctors import FakeDriver, of

from memsaver.cli.bare_driver import BareDriver
from memsaver.cli.checks import driver


@pytest.mark.parametrize(
    ("text", "cuda", "level"),
    [
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", 13000, "good"),
        ("NVIDIA UNIX x86_64 Kernel Module  525.60.13  Wed Nov 30", 12000, "good"),
        ("NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Nov 30", 12020, "bad"),
        ("", 11080, "bad"),
        ("", 12040, "good"),
    ],
)
def test_versions_of_the_driver(system, text, cuda, level):
    system({"/proc/driver/nvidia/version": f"NVRM version: {text}\nGCC version: 12.2.0\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "BareDriver", lambda: FakeDriver(cuda))
        (found,) = driver.check_driver()
    assert found.level == level
    number = re.search(r"\d{3}\.[\d.]+", text)
    assert found.data["version"] == (number[0] if number else None)
    assert level == "good" or "525 or newer" in found.advice


@pytest.mark.parametrize(
    ("attributes", "name", "level", "says"),
    [
        ({}, "device 0", "good", "NVIDIA H200, 141 GiB, compute capability 9.0"),
        ({"a20": 2}, "device 0", "bad", "prohibited"),
        ({"a20": 3}, "device 0", "warned", "EXCLUSIVE_PROCESS"),
        ({"a18": 1}, "device 0", "warned", "the host's"),
        ({"a75": 6}, "device 0", "warned", "no fingerprints"),
        ({"a102": 0}, "device 0 VMM", "bad", "not supported"),
        ({"a110": 0}, "device 0 RDMA", "warned", "not for memory of regions"),
        ({"a110": 0, "a116": 0}, "device 0 RDMA", "absent", "not supported"),
        ({"count": 0}, "devices", "bad", "finds no GPU"),
    ],
)
def test_device_capabilities(plain, attributes, name, level, says):
    plain.setattr(driver, "BareDriver", lambda: FakeDriver(**attributes))
    found = of(driver.check_devices(), name)
    assert found.level == level and says in found.text
    assert level in ("good", "absent") or found.advice


def test_a_device_that_does_not_answer_hides_no_other(sim, plain):
    plain.setattr(BareDriver, "device_count", lambda self: 2)
    found = driver.check_devices()  # the simulated driver has one device
    assert of(found, "device 0").level == "good"
    assert of(found, "device 1").level == "bad" and "cuDevice" in of(found, "device 1").text
