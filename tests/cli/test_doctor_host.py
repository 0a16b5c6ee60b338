"""Tests `memsaver doctor`'s findings about the host's memory and limits."""

import re

import pytest
from doctors import of

from memsaver._runtime.native import _C
from memsaver.cli.checks import host
from memsaver.cli.checks.control_groups import memory_limits

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
def test_the_mode_of_huge_pages_is_judged(system, mode, status, level):
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
    assert ("half the rate" in found.text) == (level == "warned")
    assert "rate" not in found.advice and bool(found.advice) == (level == "warned")
    assert found.data == {"mode": chosen, "defrag": "madvise", "khugepaged": True}


def test_a_kernel_that_does_not_report_huge_pages(system):
    """The finding states the consequence without advice, because the user cannot change the
    setting.
    """
    found = of(host.check_host(), "huge pages")
    assert (found.level, found.advice) == ("absent", "") and "half the rate" in found.text


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


def mount(point, root="/", kind="cgroup2", options="rw"):
    return f"30 1 0:26 {root} {point} rw - {kind} {kind} {options}\n"


V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
GIB = 1 << 30
LAYOUTS = {
    "one group": ("0::/job\n", mount(V2), {f"{V2}/job": 5}, 5),
    "a group above": ("0::/slice/job\n", mount(V2), {f"{V2}/slice": 3, f"{V2}/slice/job": 5}, 3),
    "version 1": (
        "4:cpu,memory:/job\n",
        mount(V1, kind="cgroup", options="rw,memory"),
        {f"{V1}/job": 4},
        4,
    ),
    "both versions": (
        "4:memory:/job\n0::/task\n",
        mount("/unified") + mount(V1, kind="cgroup", options="rw,memory"),
        {f"{V1}/job": 6, "/unified/task": 5},
        5,
    ),
    "another controller's": (
        "4:cpu:/job\n0::/task\n",
        mount(V2) + mount("/cpu", kind="cgroup", options="rw,cpu"),
        {f"{V2}/task": 5, "/cpu/job": 2},
        5,
    ),
    "a container": ("0::/pod/x/job\n", mount(V2, root="/pod/x"), {f"{V2}/job": 4, V2: 5}, 4),
    "a path of its host": ("0::/elsewhere\n", mount(V2, root="/pod/x"), {V2: 4}, 4),
    "outside its namespace": ("0::/../job\n", mount(V2), {V2: 4, f"{V2}/job": 2}, 4),
    "a folder with a blank": ("0::/job\n", mount("/a\\040b"), {"/a b/job": 4}, 4),
    "two mounts": ("0::/job\n", mount("/a", root="/pod") + mount(V2), {"/a": 2, f"{V2}/job": 4}, 4),
    "none": ("0::/job\n", mount(V2), {}, None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_limits_are_those_that_the_library_keeps(run_python, tmp_path, layout):
    """A plain layout with the limit that `doctor` finds leaves the same amount of free memory."""
    *real, least = LAYOUTS[layout]
    plain = ["0::/only\n", mount(V2), {f"{V2}/only": least} if least else {}]
    for folder, (group, mounts, limits) in (("real", real), ("plain", plain)):
        files = {
            "/proc/self/cgroup": group,
            "/proc/self/mountinfo": mounts,
            "/proc/meminfo": f"MemTotal: {1 << 30} kB\nMemAvailable: {1 << 30} kB\n",
        }
        for place, limit in limits.items():
            for name in ("memory.max", "memory.limit_in_bytes"):
                files[f"{place}/{name}"] = f"{limit * GIB}\n"
            for name in ("memory.current", "memory.usage_in_bytes"):
                files[f"{place}/{name}"] = "0\n"
        for name, text in files.items():
            path = tmp_path / folder / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    done = run_python(
        f"""
        import os
        import memsaver
        from memsaver.cli.checks.control_groups import memory_limits
        for folder in ("real", "plain"):
            os.environ["MEMSAVER_TEST_SYSTEM_ROOT"] = {str(tmp_path)!r} + "/" + folder
            least = min((nbytes for _, nbytes in memory_limits()), default=None)
            print(least, memsaver.stats().host_available_bytes)
        """
    )
    shown, expected = done.stdout.splitlines()
    assert shown == expected and shown.split()[0] == str(least and least * GIB)


def test_the_budget_is_the_librarys(options):
    found = of(host.check_host(), "host memory budget")
    available = _C.host_memory()[1]
    assert abs(found.data["available_bytes"] - available) < 1 << 30
    options(host_bytes="1GiB")
    found = of(host.check_host(), "host memory budget")
    assert found.data["bytes"] == min(1 << 30, found.data["available_bytes"])
    assert found.level == "warned" and found.data["option"] == 1 << 30


def test_limits_of_the_process_are_reported(monkeypatch):
    def limited(which):
        return (1 << 30, host.resource.RLIM_INFINITY)

    monkeypatch.setattr(host.resource, "getrlimit", limited)
    found = host.check_host()
    assert of(found, "address space").level == "bad"
    assert of(found, "file size").level == "warned"
    assert of(found, "locked memory").data == {"soft_bytes": 1 << 30, "hard_bytes": None}
