"""Tests `memsaver doctor` and `memsaver bench` on a real GPU, in separate processes."""

import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

GIB = 1 << 30


def run(*arguments, **env):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    command = [sys.executable, "-m", "memsaver", *arguments]
    return subprocess.run(
        command, env={**environment, **env}, capture_output=True, text=True, timeout=110
    )


def test_doctor_finds_the_real_driver_good():
    done = run("doctor", "--json")
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["findings"]}
    assert not [row for row in found["findings"] if "could not be checked" in row["text"]]
    assert rows["driver"]["level"] == "good", rows["driver"]
    assert rows["driver"]["data"]["simulated"] is False
    assert re.fullmatch(r"\d+\.\d", rows["driver"]["data"]["cuda"])
    device = rows["device 0"]["data"]
    assert device["bytes"] > GIB and "NVIDIA" in device["name"]
    assert rows["device 0 VMM"]["data"] == {"supported": True}
    assert rows["torch CUDA build"]["data"]["cuda"]
    assert done.stderr == ""


def test_doctor_takes_no_device_memory():
    code = """
        import ctypes
        from memsaver.cli import checks
        checks.check_all()
        flags, active = ctypes.c_uint(), ctypes.c_int()
        library = ctypes.CDLL("libcuda.so.1")
        code = library.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
        print(code, active.value)
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "0"], done.stderr


def test_bench_measures_a_real_gpu():
    done = run("bench", "--size", "4GiB", "--rounds", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["simulated"], found["size"], found["saved"]) == (False, 4 * GIB, 4 * GIB)
    rows = {row["name"]: row for row in found["figures"]}
    assert rows["bus, to the host"]["bytes_per_second"] > 5e9
    for name in ("pause, host, changed", "resume, host"):
        assert 50 < rows[name]["of_limit_percent"] < 150, rows[name]
    # Neither of these copies anything.
    for name in ("pause, none", "pause, host, unchanged"):
        assert rows[name]["median_seconds"] < 0.5 * rows["pause, host, changed"]["median_seconds"]
