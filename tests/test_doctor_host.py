"""What `memsaver doctor` says of the host's memory and limits."""

import re

import pytest
from doctors import of

from memsaver.cli.checks import host
from memsaver.cli.checks.control_groups import memory_limits
from memsaver.native import _C

THP = "/sys/kernel/mm/transparent_hugepage"


@pytest.mark.parametrize(
    ("mode", "status", "level"),
    [
        ("always [madvise] never", "1", "good"),
        ("[always] madvise never", "1", "good"),
        ("always madvise [never]", "1", "warned"),
        ("always [madvise] never", "0", "warned"),
    ],
)
def test_huge_pages(system, mode, status, level):
    system(
        {
            f"{THP}/enabled": mode,
            f"{THP}/defrag": "always defer [madvise] never",
            f"{THP}/khugepaged/defrag": "1",
            "/proc/self/status": f"Name:\tpython\nTHP_enabled:\t{status}\n",
        }
    )
    found = of(host.check_host(), "huge pages")
    assert found.level == level
    chosen = re.search(r"\[(\w+)\]", mode)[1]
    assert found.data == {"mode": chosen, "defrag": "madvise", "khugepaged": True}


def test_the_limits_of_control_groups(system):
    system(
        {
            "/proc/self/cgroup": "4:cpu,memory:/job\n0::/slice/task\n",
            "/proc/self/mountinfo": (
                "30 1 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
                "31 1 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                "32 1 0:28 / / rw - ext4 /dev/sda rw\n"
            ),
            "/sys/fs/cgroup/unified/slice/memory.max": f"{8 << 30}\n",
            "/sys/fs/cgroup/unified/slice/task/memory.max": "max\n",
            "/sys/fs/cgroup/unified/slice/task/memory.high": f"{6 << 30}\n",
            "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{7 << 30}\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "/proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
        }
    )
    assert sorted(memory_limits()) == [
        ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", 7 << 30),
        ("/sys/fs/cgroup/unified/slice/memory.max", 8 << 30),
        ("/sys/fs/cgroup/unified/slice/task/memory.high", 6 << 30),
    ]
    found = of(host.check_host(), "memory limits")
    assert "32 GiB" in found.text and "memory.high allows 6 GiB" in found.text
    assert found.data["available_bytes"] == 16 << 30


def test_the_budget_is_the_librarys(options):
    found = of(host.check_host(), "host memory budget")
    available = _C.host_memory()[1]
    assert abs(found.data["available_bytes"] - available) < 1 << 30
    options(host_bytes="1GiB")
    found = of(host.check_host(), "host memory budget")
    assert found.data["bytes"] == min(1 << 30, found.data["available_bytes"])
    assert found.level == "warned" and found.data["option"] == 1 << 30


def test_limits_of_the_process(monkeypatch):
    def limited(which):
        return (1 << 30, host.resource.RLIM_INFINITY)

    monkeypatch.setattr(host.resource, "getrlimit", limited)
    found = host.check_host()
    assert of(found, "address space").level == "bad"
    assert of(found, "file size").level == "warned"
    assert of(found, "locked memory").data == {"soft_bytes": 1 << 30, "hard_bytes": None}
