"""Checks of the host's memory for backups, and of limits on the speed of the first backup."""

from __future__ import annotations

import os
import resource

from memsaver._runtime.native import _C
from memsaver._runtime.text import size_text
from memsaver.cli.checks.control_groups import memory_limits
from memsaver.cli.checks.findings import Finding, absent, bad, good, warned
from memsaver.cli.checks.system import read_system_file
from memsaver.errors import MemsaverError

__all__ = ["check_host"]

LITTLE = 4 << 30  # too little host memory for the weights of any model
FEW_CPUS = 4  # with so few CPUs, a first backup's pages are touched at half the bus's rate
MAPPINGS = 65530  # the kernel's default of vm.max_map_count


def check_host() -> list[Finding]:
    """Check the memory budget of backups, control groups, huge pages, CPUs and process limits."""
    return [
        _budget(),
        _memory_limits(),
        _huge_pages(),
        _cpus(),
        _locked_memory(),
        *_other_limits(),
    ]


def _budget() -> Finding:
    name = "host memory budget"
    try:
        available = _C.host_memory()[1]
        most = int(_C.option("host_bytes"))
    except MemsaverError as error:  # an invalid option; `check_options` gives the advice
        return warned(name, f"unknown: {error}", "correct that option")
    if available >= 1 << 63:
        text = "not limited, because the system does not report its memory"
        return warned(name, text, "set MEMSAVER_HOST_BYTES", bytes=None, option=most)
    least = min(available, most) if most else available
    text = f"{size_text(least)} for backups now"
    text += f", by host_bytes={size_text(most)}" if most and most <= available else ""
    data = {"bytes": least, "available_bytes": available, "option": most}
    if least < LITTLE:
        advice = "free host memory, raise the limit, or use backup='disk' or 'none'"
        return warned(name, text, advice, **data)
    return good(name, text, **data)


def _memory_limits() -> Finding:
    limits = memory_limits()
    total = _meminfo("MemTotal")
    data = {
        "total_bytes": total,
        "available_bytes": _meminfo("MemAvailable"),
        "cgroup_limits": [{"file": file, "bytes": limit} for file, limit in limits],
    }
    text = f"the system has {size_text(total)}" if total else "the system does not report it"
    if not limits:
        return good("memory limits", f"{text}; no control group limits it", **data)
    file, least = min(limits, key=lambda row: row[1])
    return good("memory limits", f"{text}; {file} allows {size_text(least)}", **data)


def _meminfo(key: str) -> int | None:
    """Return the value of a line in /proc/meminfo, in bytes."""
    for line in (read_system_file("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == key and rest.split()[:1] and rest.split()[0].isdigit():
            return int(rest.split()[0]) << 10
    return None


def _huge_pages() -> Finding:
    name, folder = "huge pages", "/sys/kernel/mm/transparent_hugepage"
    mode = _chosen(read_system_file(f"{folder}/enabled"))
    defrag = _chosen(read_system_file(f"{folder}/defrag"))
    daemon = read_system_file(f"{folder}/khugepaged/defrag")
    data = {"mode": mode, "defrag": defrag, "khugepaged": None if daemon is None else daemon == "1"}
    slower = "the pages of a first backup are allocated and pinned at about half the rate"
    if mode is None:
        text = f"the kernel does not report them; without them {slower}"
        return absent(name, text, **data)
    text = f"transparent huge pages {mode}, defrag {defrag or 'unknown'}"
    text += "" if daemon is None else f", khugepaged {'on' if daemon == '1' else 'off'}"
    disabled = "\nTHP_enabled:\t0" in "\n" + (read_system_file("/proc/self/status") or "")
    if mode == "never":
        advice = f"echo madvise > {folder}/enabled (as root)"
        return warned(name, f"{text}: {slower}", advice, **data)
    if disabled:
        advice = "find the program that disables them (prctl PR_SET_THP_DISABLE)"
        return warned(name, f"{text}, but off for this process: {slower}", advice, **data)
    return good(name, text, **data)


def _chosen(text: str | None) -> str | None:
    """Return the word in brackets, such as "madvise" in "always [madvise] never"."""
    for word in (text or "").split():
        if word.startswith("[") and word.endswith("]"):
            return word[1:-1]
    return None


def _cpus() -> Finding:
    count = len(os.sched_getaffinity(0))
    text = f"{count} for this process"
    if count < FEW_CPUS:
        advice = "allow more CPUs (taskset, the container's --cpus): a first backup needs them"
        return warned("CPUs", text, advice, count=count)
    return good("CPUs", text, count=count)


def _locked_memory() -> Finding:
    name = "locked memory"
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    data = {"soft_bytes": _limit(soft), "hard_bytes": _limit(hard)}
    if soft == resource.RLIM_INFINITY:
        return good(name, "no limit (ulimit -l)", **data)
    text = f"at most {size_text(soft)} (ulimit -l); CUDA's pinned memory does not count"
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        advice = "RDMA registrations count towards it: raise it (ulimit -l unlimited)"
        return warned(name, text, advice, **data)
    return good(name, text, **data)


def _other_limits() -> list[Finding]:
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        text = f"at most {size_text(soft)} (ulimit -v), of which every tag reserves many GiB"
        advice = "raise it: ulimit -v unlimited"
        found.append(bad("address space", text, advice, soft_bytes=soft))
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY:
        text = f"at most {size_text(soft)} (ulimit -f)"
        advice = "raise it for backup='disk': ulimit -f unlimited"
        found.append(warned("file size", text, advice, soft_bytes=soft))
    mappings = read_system_file("/proc/sys/vm/max_map_count")
    if mappings and mappings.isdigit() and int(mappings) < MAPPINGS:
        text = f"at most {mappings} (vm.max_map_count)"
        advice = f"sysctl vm.max_map_count={MAPPINGS}"
        found.append(warned("memory mappings", text, advice, count=int(mappings)))
    return found


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
