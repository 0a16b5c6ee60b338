"""Checks of the driver and its devices. The checks create no CUDA context, because querying
attributes does not need one.
"""

from __future__ import annotations

import importlib.util
import os
import re

from memsaver._runtime.text import size_text
from memsaver.cli.bare_driver import BareDriver
from memsaver.cli.checks.findings import Finding, absent, bad, good, warned
from memsaver.cli.checks.system import read_system_file
from memsaver.errors import MemsaverError

__all__ = ["check_devices", "check_driver", "check_nvml"]

OLDEST = 525  # the driver of CUDA 12.0
OLDEST_CUDA = 12000

# Values of CUdevice_attribute.
_INTEGRATED = 18
_COMPUTE_MODE = 20
_MAJOR, _MINOR = 75, 76
_VMM = 102
_RDMA_WITH_VMM = 110
_RDMA = 116

_EXCLUSIVE, _PROHIBITED = 3, 2  # values of CUcomputemode
_FIRST_WITH_KERNEL = 7  # the minimum major compute capability for fingerprints


def check_driver() -> list[Finding]:
    """Check whether there is a usable driver, and report its version."""
    try:
        driver = BareDriver()
    except MemsaverError as error:
        if os.environ.get("MEMSAVER_DRIVER") == "sim":
            named = re.search(r"MEMSAVER_SIM_[A-Z]+", str(error))
            correct = f"correct {named[0]}, or " if named else ""
            advice = f"{correct}unset MEMSAVER_DRIVER to use a GPU"
            return [bad("driver", str(error), advice, opened="sim")]
        advice = (
            "install NVIDIA's driver, and start a container with its GPUs (docker run --gpus all); "
            "or set MEMSAVER_DRIVER=sim to develop without a GPU"
        )
        if os.path.exists("/dev/nvidiactl"):
            advice = (
                "the kernel driver is loaded: give this process libcuda.so.1 (in a container "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility) and a GPU (CUDA_VISIBLE_DEVICES)"
            )
        return [bad("driver", str(error), advice, opened=os.environ.get("MEMSAVER_DRIVER") or None)]
    cuda = _cuda(driver.version)
    data = {"opened": driver.name, "cuda": cuda, "simulated": driver.simulated}
    if driver.simulated:
        return [
            warned(
                "driver",
                f"the simulated driver, because of MEMSAVER_DRIVER=sim; it reports CUDA {cuda}",
                "unset MEMSAVER_DRIVER to use a GPU",
                version=None,
                **data,
            )
        ]
    version = kernel_driver_version()
    text = f"{version or 'of an unknown version'}, CUDA {cuda}, {driver.name}"
    data["version"] = version
    number = int(version.split(".")[0]) if version else None
    if (number is not None and number < OLDEST) or driver.version < OLDEST_CUDA:
        advice = f"install driver {OLDEST} or newer"
        return [bad("driver", f"{text}: too old", advice, **data)]
    return [good("driver", text, **data)]


def kernel_driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, such as "580.159.04", or None."""
    text = read_system_file("/proc/driver/nvidia/version") or ""
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)*)\s", text)
    return found[1] if found else None


def check_devices() -> list[Finding]:
    """Check the capabilities of each device. Without a driver, there are no findings."""
    try:
        driver = BareDriver()
    except MemsaverError:
        return []
    count = driver.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count == 0:
        asked = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        advice = "let this process use a GPU" + (" or unset CUDA_VISIBLE_DEVICES" if asked else "")
        return [bad("devices", f"the driver finds no GPU{asked}", advice, count=0)]
    found = []
    for device in range(count):
        try:
            found += _check_device(driver, device)
        except MemsaverError as error:
            advice = "examine it with nvidia-smi; exclude it with CUDA_VISIBLE_DEVICES"
            found.append(bad(f"device {device}", str(error), advice))
    return found


def check_nvml() -> list[Finding]:
    """Check whether Python can query NVML, NVIDIA's optional management library."""
    if importlib.util.find_spec("pynvml") is None:
        advice = "errors then name the processes that use the GPU: pip install 'memsaver[nvml]'"
        return [absent("NVML", "nvidia-ml-py is not installed", advice, installed=False)]
    text = "nvidia-ml-py is installed: errors name the processes that use the GPU"
    return [good("NVML", text, installed=True)]


def _check_device(driver: BareDriver, device: int) -> list[Finding]:
    name, total = driver.device_name(device), driver.total_bytes(device)
    major, minor = driver.attribute(device, _MAJOR), driver.attribute(device, _MINOR)
    mode = driver.attribute(device, _COMPUTE_MODE)
    integrated = bool(driver.attribute(device, _INTEGRATED))
    this = f"device {device}"
    data = {
        "device": device,
        "name": name,
        "bytes": total,
        "compute_capability": f"{major}.{minor}",
    }
    text = f"{name}, {size_text(total)}, compute capability {major}.{minor}"
    if mode == _PROHIBITED:
        first = bad(this, f"{text}: computing is prohibited", "nvidia-smi -c DEFAULT", **data)
    elif mode == _EXCLUSIVE:
        first = warned(
            this,
            f"{text}: only one process can use it (compute mode EXCLUSIVE_PROCESS)",
            "to share it between an engine and a trainer, run nvidia-smi -c DEFAULT",
            **data,
        )
    elif integrated:
        first = warned(
            this,
            f"{text}: its memory is the host's",
            "a host backup uses the memory that the pause releases: use backup='disk' or 'none'",
            **data,
        )
    elif major < _FIRST_WITH_KERNEL:
        first = warned(
            this,
            f"{text}: no fingerprints below {_FIRST_WITH_KERNEL}.0",
            "every pause with a backup saves all contents; this GPU does not support fingerprints",
            **data,
        )
    else:
        first = good(this, text, **data)
    return [first, _virtual_memory(driver, device), _rdma(driver, device)]


def _virtual_memory(driver: BareDriver, device: int) -> Finding:
    name = f"device {device} VMM"
    if driver.attribute(device, _VMM):
        return good(name, "virtual memory management: supported", supported=True)
    return bad(
        name,
        "virtual memory management: not supported, but memsaver requires it",
        "use a GPU that supports it (no vGPU without unified memory, no WDDM), "
        "and driver 525 or newer",
        supported=False,
    )


def _rdma(driver: BareDriver, device: int) -> Finding:
    name = f"device {device} RDMA"
    plain = bool(driver.attribute(device, _RDMA))
    mapped = bool(driver.attribute(device, _RDMA_WITH_VMM))
    data = {"supported": plain, "with_vmm": mapped}
    if mapped:
        return good(name, "GPUDirect RDMA: supported, for memory of regions too", **data)
    if plain:
        return warned(
            name,
            "GPUDirect RDMA: supported, but not for memory of regions",
            "allocate network buffers outside regions (memsaver.disabled())",
            **data,
        )
    return absent(
        name, "GPUDirect RDMA: not supported; only network cards with direct access need it", **data
    )


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
