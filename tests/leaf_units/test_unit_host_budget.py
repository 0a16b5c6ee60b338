"""Tests the available host memory and the claims on it."""

from pathlib import Path

import pytest
from control_groups import IN_JOB_V1, IN_JOB_V2, MOUNT_V2, mount_v1

MIB = 1 << 20
GIB = 1 << 30
UNLIMITED = (1 << 64) - 1


def meminfo(available, total=None):
    total = total or 100 * GIB
    return {
        "/proc/meminfo": f"MemTotal:  {total // 1024} kB\nMemFree:  5 kB\n"
        f"MemAvailable:  {available // 1024} kB\nMemAvailableX: 1 kB\n"
    }


def v2(directory, limit, usage, inactive=0, active=0, high="max"):
    base = f"/sys/fs/cgroup{directory}"
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.high": f"{high}\n",
        f"{base}/memory.current": f"{usage}\n",
        f"{base}/memory.stat": f"anon 77\ninactive_file {inactive}\nactive_file {active}\n",
    }


def v1(directory, limit, usage, inactive=0, active=0):
    return {
        f"{directory}/memory.limit_in_bytes": f"{limit}\n",
        f"{directory}/memory.usage_in_bytes": f"{usage}\n",
        f"{directory}/memory.stat": f"inactive_file 1\nactive_file 2\n"
        f"total_inactive_file {inactive}\ntotal_active_file {active}\n",
    }


def margin(total):
    """Return the number of bytes that stay free, as host_budget.h specifies."""
    return max(total // 50, 256 * MIB)


NAMESPACE_V2 = {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": MOUNT_V2}
V1_ROOT = 9223372036854771712  # the value for no limit
HOST = meminfo(60 * GIB)
HOST_BYTES = 60 * GIB - margin(100 * GIB)


@pytest.mark.parametrize(
    ("files", "available"),
    [
        pytest.param({}, UNLIMITED, id="nothing can be read"),
        pytest.param(HOST, HOST_BYTES, id="meminfo"),
        pytest.param(meminfo(3 * GIB, 4 * GIB), 3 * GIB - 256 * MIB, id="the least margin"),
        pytest.param(meminfo(100 * MIB, 4 * GIB), 0, id="below the margin"),
        pytest.param(
            {**HOST, **IN_JOB_V2, **v2("/a/job", "max", GIB), **v2("/a", "max", GIB)},
            HOST_BYTES,
            id="version 2 without limits",
        ),
        pytest.param(
            {**HOST, **IN_JOB_V2, **v2("/a/job", 40 * GIB, 10 * GIB)},
            30 * GIB - margin(40 * GIB),
            id="version 2",
        ),
        pytest.param(
            {**HOST, **IN_JOB_V2, **v2("/a/job", 40 * GIB, 39 * GIB, 6 * GIB, 4 * GIB)},
            11 * GIB - margin(40 * GIB),
            id="page cache of version 2",
        ),
        pytest.param(
            {**HOST, **IN_JOB_V2, **v2("/a/job", 40 * GIB, GIB), **v2("/a", 8 * GIB, 2 * GIB)},
            6 * GIB - 256 * MIB,
            id="an ancestor is tighter",
        ),
        pytest.param(
            {**HOST, **IN_JOB_V2, **v2("/a/job", 40 * GIB, GIB, high=20 * GIB)},
            19 * GIB - margin(20 * GIB),
            id="the soft limit",
        ),
        pytest.param(
            {**HOST, **NAMESPACE_V2, **v2("", 16 * GIB, 4 * GIB)},
            12 * GIB - margin(16 * GIB),
            id="a namespace of version 2",
        ),
        pytest.param(
            {**HOST, **IN_JOB_V2, **v2("/a/job", GIB, 2 * GIB)}, 0, id="more used than allowed"
        ),
        pytest.param(
            {**HOST, **IN_JOB_V2, "/sys/fs/cgroup/a/job/memory.max": "1\n"},
            HOST_BYTES,
            id="a limit without its usage",
        ),
        pytest.param(
            {
                **HOST,
                **IN_JOB_V1,
                **v1("/sys/fs/cgroup/memory/m", 20 * GIB, 18 * GIB, 2 * GIB, GIB),
                **v1("/sys/fs/cgroup/memory", V1_ROOT, 50 * GIB),
            },
            5 * GIB - margin(20 * GIB),
            id="version 1",
        ),
        pytest.param(
            {
                **HOST,
                "/proc/self/cgroup": "4:memory,hugetlb:/kube/pod/c1\n",
                "/proc/self/mountinfo": mount_v1("memory", "/kube/pod/c1", "/cg\\040mem"),
                **v1("/cg mem", 20 * GIB, 4 * GIB),
            },
            16 * GIB - margin(20 * GIB),
            id="a container of version 1, at an odd place",
        ),
        pytest.param(
            {
                **HOST,
                "/proc/self/cgroup": "0::/../other\n",
                "/proc/self/mountinfo": MOUNT_V2,
                **v2("", 16 * GIB, 4 * GIB),
            },
            12 * GIB - margin(16 * GIB),
            id="outside of its namespace",
        ),
        pytest.param(
            {
                **HOST,
                "/proc/self/cgroup": "4:memory:/docker/c1\n0::/\n",
                # Both versions of cgroups, and a mount that shows another group.
                "/proc/self/mountinfo": MOUNT_V2
                + mount_v1("memory", "/docker/c2", "/elsewhere")
                + mount_v1("memory"),
                **v1("/sys/fs/cgroup/memory/docker/c1", 10 * GIB, 1 * GIB),
                **v1("/elsewhere", 1 * GIB, 1 * GIB),
            },
            9 * GIB - 256 * MIB,
            id="hybrid",
        ),
    ],
)
def test_available_host_memory_is_the_least_limit(system, files, available):
    assert system(files)("available") == [str(available)]


def test_available_host_memory_of_this_machine(leaf):
    text = Path("/proc/meminfo").read_text()
    total = int(text.split("MemTotal:")[1].split()[0]) * 1024
    assert 0 <= int(leaf("available")[0]) < total


TEN = meminfo(10 * GIB + 256 * MIB, 10 * GIB)  # 10 GiB of these are available


def test_a_claim_is_seen_until_it_is_touched(system):
    said = system(TEN)(
        *("claim", "take", 4096, "touched", 1024, "touched", 9999, "shrink", 512),
        *("grow", 2048, "shrink", 3584, "touched", 1024, "untouched", 9999),
    )
    assert said == [
        "claimed 4096 available 6144 this 4096 touched 0",
        "claimed 4096 available 7168 this 4096 touched 1024",
        "claimed 4096 available 10240 this 4096 touched 4096",
        "claimed 3584 available 10240 this 3584 touched 3584",
        "claimed 5632 available 8192 this 5632 touched 3584",
        "claimed 2048 available 8192 this 2048 touched 0",
        "claimed 2048 available 9216 this 2048 touched 1024",
        "claimed 1024 available 10240 this 1024 touched 1024",
        "moved: claimed 1024 available 10240 this 0 touched 0",
        "dropped: claimed 0 available 10240 this 0 touched 0",
    ]


def test_a_claim_beyond_the_systems_memory_is_refused(system):
    said = system(TEN)("claim", "take", 10241, "take", 10000, "grow", 1000)
    assert said[0].startswith(
        f"error 5 needed {10241 * MIB} free {10 * GIB}: a backup needs 10.001 GiB"
    )
    assert "MemAvailable" in said[0] and "backup='disk'" in said[0] and "trim()" in said[0]
    assert said[1].startswith("claimed 0 available 10240 this 0")
    assert said[2].startswith("claimed 10000 available 240 this 10000")
    assert said[3].startswith(f"error 5 needed {1000 * MIB} free {240 * MIB}")
    assert said[4].startswith("claimed 10000 available 240 this 10000")


def test_a_refused_claim_names_the_group_that_limits_it(system):
    files = {**HOST, **IN_JOB_V2, **v2("/a/job", 40 * GIB, GIB), **v2("/a", 8 * GIB, 2 * GIB)}
    said = system(files)("claim", "take", 8192)
    assert said[0].startswith(f"error 5 needed {8 * GIB} free {6 * GIB - 256 * MIB}")
    assert "/sys/fs/cgroup/a/memory.max, which is 8 GiB" in said[0]


def test_the_option_limits_all_claims_together(system):
    said = system(TEN)(
        *("claim", "option", 1000, "take", 600, "touched", 600, "grow", 401, "grow", 400)
    )
    assert said[3].startswith(f"error 5 needed {401 * MIB} free {400 * MIB}")
    assert "host_bytes (MEMSAVER_HOST_BYTES), which is 1000 MiB" in said[3]
    assert said[4] == "claimed 600 available 10240 this 600 touched 600"
    assert said[5] == "claimed 1000 available 9840 this 1000 touched 600"
    said = system(TEN)("claim", "take", 601, MEMSAVER_HOST_BYTES="600MiB")
    assert said[0].startswith(f"error 5 needed {601 * MIB} free {600 * MIB}")
    said = system(TEN)("claim", "take", 1, MEMSAVER_HOST_BYTES="some")
    assert said[0].startswith("error 9") and "MEMSAVER_HOST_BYTES" in said[0]


@pytest.mark.parametrize("env", [{}, {"MEMSAVER_HOST_BYTES": "10GiB"}])
def test_no_two_threads_are_granted_the_same_memory(system, env):
    files = TEN if not env else meminfo(90 * GIB)
    assert system(files)("claims_at_once", 3000, **env) == [
        "granted 3 refused 5 claimed 9000",
        "claimed 0",
    ]
