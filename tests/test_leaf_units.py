"""Units of the core that the C ABI reaches only through others: workers, host memory, files.

tests/native is linked with the objects of the build; each test runs a case of it in
a process of its own. What the system says is faked below MEMSAVER_TEST_SYSTEM_ROOT.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import memsaver
from memsaver.errors import BackupError, ConfigError, error_of

ROOT = Path(__file__).parent.parent
UNITS = ["backup_file", "host_budget", "log", "numa", "options", "system_files", "text", "workers"]


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The path of the test program."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    built = ROOT / "build" / f"native-{sys.implementation.cache_tag}" / "libmemsaver"
    parts = []
    for unit in UNITS:
        source = ROOT / "csrc" / "core" / f"{unit}.cpp"
        made = built / f"csrc/core/{unit}.cpp.o"
        fresh = made.is_file() and made.stat().st_mtime >= source.stat().st_mtime
        fresh = fresh and "CXX" not in os.environ  # another compiler, or with other flags
        parts.append(str(made if fresh else source))
    out = tmp_path_factory.mktemp("native") / "leaf_units"
    parts += map(str, sorted((ROOT / "tests" / "native").glob("leaf_*.cpp")))
    command = [*compiler.split(), "-std=c++17", "-pthread", "-Wall", "-Wextra", "-fPIC"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}", "-o", str(out), *parts, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return out


@pytest.fixture
def leaf(program, tmp_path):
    """Runs a case: `leaf("workers_order", 2)` gives the lines it said."""

    def run(case: str, *arguments, shell: str = "", **env) -> list[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
        environment.update({name: str(value) for name, value in env.items()})
        command = [str(program), case, *map(str, arguments)]
        if shell:
            command = ["bash", "-c", f'{shell} && exec "$@"', "bash", *command]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr)
        return done.stdout.splitlines()

    return run


@pytest.fixture
def system(tmp_path, leaf):
    """A faked /proc and /sys: `system({"/proc/meminfo": ...})("available")` runs a case on it."""

    def fake(files: dict[str, str]):
        root = tmp_path / "system"
        shutil.rmtree(root, ignore_errors=True)
        for name, text in files.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        def run(case: str, *arguments, **env):
            return leaf(case, *arguments, MEMSAVER_TEST_SYSTEM_ROOT=root, **env)

        return run

    return fake


MOUNT_V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"


def mount_v1(controllers, root="/", point=None):
    point = point or f"/sys/fs/cgroup/{controllers}"
    return f"36 31 0:31 {root} {point} rw - cgroup cgroup rw,{controllers}\n"


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granted", "wanted", "threads", "on_caller"),
    [(99, 4, 4, 0), (1, 4, 1, 0), (0, 4, 0, 100), (99, 0, 0, 100), (99, 1, 1, 0)],
)
def test_every_job_runs_once_with_as_many_threads_as_there_are(
    leaf, granted, wanted, threads, on_caller
):
    said = leaf("workers_order", granted, wanted)
    assert said == [f"threads {threads} on caller {on_caller}"]


def test_jobs_run_in_the_background_and_end_in_any_order(leaf):
    assert leaf("workers_background") == ["1 is done", "0 is done"]


@pytest.mark.parametrize("granted", [99, 1, 0])
def test_an_error_is_kept_for_who_waits(leaf, granted):
    broken = "error 6 needed 0 free 0: job 3 is broken"
    absent = "error 11 needed 0 free 0: there is no job 10"
    assert leaf("workers_error", granted) == [broken, broken, absent, "ran 10"]


def test_after_cancel_nothing_runs_and_nothing_starts(leaf):
    assert leaf("workers_cancel") == ["error 11 needed 0 free 0: job 999 was cancelled"]


def test_the_destructor_waits_for_running_jobs_only(leaf):
    assert leaf("workers_destroyed") == []


def test_workers_get_no_signal_but_their_faults(leaf):
    assert leaf("workers_signals") == ["blocked 4 of 4, faults 0, the caller's 0"]


@pytest.mark.parametrize(("granted", "on_caller"), [(99, 1), (2, 3), (0, 5)])
def test_parallel_calls_all_run_and_the_first_error_counts(leaf, granted, on_caller):
    assert leaf("parallel", granted) == [
        "error 7 needed 0 free 0: call 3",
        f"ran 5 on caller {on_caller} the first too",
    ]


CPUS = len(os.sched_getaffinity(0))
IN_JOB_V2 = {"/proc/self/cgroup": "0::/a/job\n", "/proc/self/mountinfo": MOUNT_V2}
IN_JOB_V1 = {
    "/proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/docker/job\n0::/\n",
    # A container of version 1 without a namespace: the mount shows its own group.
    "/proc/self/mountinfo": mount_v1("memory") + mount_v1("cpu,cpuacct", "/docker/job"),
}


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, CPUS),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/job/cpu.max": "max 100000\n"}, CPUS),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/job/cpu.max": "50000 100000\n"}, 1),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/job/cpu.max": "100001 100000\n"}, 2),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/cpu.max": "100000 100000\n"}, 1),
        ({**IN_JOB_V2, "/sys/fs/cgroup/b/cpu.max": "100000 100000\n"}, CPUS),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/job/cpu.max": "nonsense\n"}, CPUS),
        (
            {
                **IN_JOB_V1,
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "90000\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                **IN_JOB_V1,
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            CPUS,
        ),
    ],
)
def test_worker_count(system, files, count):
    assert system(files)("worker_count") == [str(min(count, CPUS, 16))]


def test_worker_count_follows_the_affinity(leaf):
    one = min(os.sched_getaffinity(0))
    assert leaf("worker_count", shell=f"taskset -pc {one} $$ >/dev/null") == ["1"]


# --- host memory ----------------------------------------------------------------------------------

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
    """What host_budget.h promises to leave."""
    return max(total // 50, 256 * MIB)


NAMESPACE_V2 = {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": MOUNT_V2}
V1_ROOT = 9223372036854771712  # what a group without a limit says
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
                # Both versions, and a mount that shows another group.
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
def test_available_host_memory(system, files, available):
    assert system(files)("available") == [str(available)]


def test_available_host_memory_of_this_machine(leaf):
    text = Path("/proc/meminfo").read_text()
    total = int(text.split("MemTotal:")[1].split()[0]) * 1024
    assert 0 <= int(leaf("available")[0]) < total


TEN = meminfo(10 * GIB + 256 * MIB, 10 * GIB)  # of which 10 GiB can be had


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
    assert said[0].startswith(f"error 5 needed {10241 * MIB} free {10 * GIB}: the test needs 10.00")
    assert "MemAvailable" in said[0] and "backup='disk'" in said[0] and "trim()" in said[0]
    assert said[1].startswith("claimed 0 available 10240 this 0")
    assert said[2].startswith("claimed 10000 available 240 this 10000")
    assert said[3].startswith(f"error 5 needed {1000 * MIB} free {240 * MIB}")
    assert said[4].startswith("claimed 10000 available 240 this 10000")


def test_a_refused_claim_names_the_group_that_limits_it(system):
    files = {**HOST, **IN_JOB_V2, **v2("/a/job", 40 * GIB, GIB), **v2("/a", 8 * GIB, 2 * GIB)}
    said = system(files)("claim", "take", 8192)
    assert said[0].startswith(f"error 5 needed {8 * GIB} free {6 * GIB - 256 * MIB}")
    assert "/sys/fs/cgroup/a/memory.max, which is 8.00 GiB" in said[0]


def test_the_option_limits_all_claims_together(system):
    said = system(TEN)(
        *("claim", "option", 1000, "take", 600, "touched", 600, "grow", 401, "grow", 400)
    )
    assert said[3].startswith(f"error 5 needed {401 * MIB} free {400 * MIB}")
    assert "host_bytes (MEMSAVER_HOST_BYTES), which is 1000.00 MiB" in said[3]
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


# --- NUMA -----------------------------------------------------------------------------------------

DEVICE = "/sys/bus/pci/devices/0000:1a:00.0/numa_node"
ONLINE = "/sys/devices/system/node/online"


@pytest.mark.parametrize(
    ("files", "node"),
    [
        ({ONLINE: "0-1\n", DEVICE: "1\n"}, 1),
        ({ONLINE: "0,2\n", DEVICE: "0\n"}, 0),
        ({ONLINE: "0\n", DEVICE: "0\n"}, -1),
        ({ONLINE: "0-1\n", DEVICE: "-1\n"}, -1),
        ({ONLINE: "0-1\n", DEVICE: "\n"}, -1),
        ({ONLINE: "0-1\n"}, -1),
        ({DEVICE: "1\n"}, -1),
    ],
)
def test_the_node_of_a_device(system, files, node):
    assert system(files)("node_of", "0000:1A:00.0") == [str(node)]


@pytest.mark.parametrize(
    ("node", "mode", "nodes"),
    [(0, 1, 1), (-1, 0, 0), (1023, 0, 0), (1 << 20, 0, 0)],
    ids=["there is", "unknown", "there is not", "there cannot be"],
)
def test_preferring_a_node(leaf, node, mode, nodes):
    said = leaf("prefer", node)
    if said == ["the kernel does not say"]:
        pytest.skip("this kernel has no NUMA policies")
    assert said == [f"mode {mode} nodes {nodes} byte 7"]


# --- the backup's file ----------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A directory of a disk's file system, that of the tests' own directory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def memory_disk():
    """A directory in tmpfs."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


PRIVATE = "mode 600 links 0 close on exec 1, entries '', deleted"
ROUND_TRIP = [PRIVATE, "held 8", "wrong 0 held 8", "punched: right held 4"]


def test_many_threads_write_and_read_a_private_file(leaf, disk):
    said = leaf("file_round_trip", disk)
    assert said[:-1] == ROUND_TRIP and said[-1] in ("direct 0", "direct 1")
    assert not list(disk.iterdir())


def test_a_file_in_tmpfs(leaf, memory_disk):
    assert leaf("file_round_trip", memory_disk)[:-1] == ROUND_TRIP


@pytest.mark.parametrize(
    ("lacking", "said", "direct"),
    [
        ("unnamed files", ROUND_TRIP, "1"),
        ("direct transfers", ROUND_TRIP, "0"),
        ("direct reads", [*ROUND_TRIP, "it is no longer direct"], "0"),
        ("patience", ROUND_TRIP, "1"),
        ("direct transfers and patience", ROUND_TRIP, "0"),
        (
            "reservations",
            [PRIVATE, "held 0", "wrong 0 held 8", "not punched: right"],
            "1",
        ),
    ],
)
def test_a_file_where_the_system_lacks_something(leaf, disk, lacking, said, direct):
    usual = leaf("file_round_trip", disk)[-1]
    if usual == "direct 0":
        if lacking == "direct reads":
            pytest.skip("this file system has no direct transfers")
        direct = "0"
    assert leaf("file_round_trip", disk, LEAF_SYSTEM=lacking) == [*said, f"direct {direct}"]


def test_the_page_cache_is_not_filled(leaf, disk):
    # Of 8 MiB that were written and read without O_DIRECT nothing is left in memory.
    assert leaf("file_cache", disk, LEAF_SYSTEM="direct transfers") == ["cached 0"]


def test_the_space_goes_with_the_file_and_not_with_a_forked_child(leaf, disk):
    assert leaf("file_fork", disk) == ["the contents are there", "blocks left 0"]


@pytest.mark.parametrize("lacking", ["nothing", "direct transfers"])
def test_reading_beyond_the_end_is_an_error(leaf, disk, lacking):
    never, cut = leaf("file_short", disk, LEAF_SYSTEM=lacking)
    for line, done in ((never, 0), (cut, 700000)):
        assert line.startswith(f"error 6 needed {MIB} free 0 errno {errno.EIO}: reading the 1.00")
        assert f"the file ends after {done} of these bytes" in line and str(disk)[:40] in line


def test_what_is_not_aligned_is_refused(leaf, disk):
    said = leaf("file_misuse", disk)
    assert len(said) == 6 and said[5] == "0"
    for line in said[:5]:
        assert line.startswith("error 11 ") and "not aligned to 4096 bytes" in line


@pytest.mark.parametrize("lacking", ["nothing", "direct transfers"])
def test_the_limit_of_file_sizes_is_an_error_and_no_signal(leaf, disk, lacking):
    said = leaf("file_limit", disk, LEAF_SYSTEM=lacking)
    for line, verb, needed in zip(
        said, ("reserving", "writing", "writing"), (2 * MIB, 2 * MIB, MIB), strict=False
    ):
        assert line.startswith(f"error 6 needed {needed} free 0 errno {errno.EFBIG}: {verb} the ")
        assert "ulimit -f" in line
    assert said[3:] == ["blocked 0 pending 0"]


def test_a_bad_disk_is_an_error(leaf, disk):
    (line,) = leaf("file_write", disk, MIB, LEAF_SYSTEM="a good disk")
    assert line.startswith(f"error 6 needed {MIB} free 0 errno {errno.EIO}: writing the 1.00 MiB")


def test_a_full_disk_is_met_before_anything_is_lost(program, leaf, disk):
    mount = 'mount -t tmpfs -o size=4m none "$FOLDER"'
    for namespace in (["unshare", "-m"], ["unshare", "-rm"]):
        command = [
            *namespace,
            "sh",
            "-c",
            f'{mount} && exec "$@"',
            "sh",
            program,
            "file_full",
            disk,
        ]
        done = subprocess.run(
            command, env={**os.environ, "FOLDER": str(disk)}, capture_output=True, text=True
        )
        if done.returncode == 0:
            break
    else:
        pytest.skip(f"a small file system cannot be mounted: {done.stderr}")
    said = done.stdout.splitlines()
    assert said[0].startswith(f"error 6 needed {4 * MIB} free ")
    assert f" errno {errno.ENOSPC}: reserving the 4.00 MiB" in said[0]
    assert "No space left on device (2.00 MiB" in said[0] and "disk_dir" in said[0]
    assert said[1:3] == ["what was there stays", "held 2"]
    assert f" errno {errno.ENOSPC}: writing the 2.00 MiB" in said[3]


def test_a_full_disk_where_space_cannot_be_reserved(leaf, disk):
    said = leaf("file_reserve", disk, 1 << 60, LEAF_SYSTEM="reservations")
    assert said[0].startswith(f"error 6 needed {1 << 60} free ")
    assert f"errno {errno.ENOSPC}" in said[0]
    said = leaf("file_reserve", disk, MIB)
    assert said == [f"held {MIB}"]


def test_the_directory_of_a_file(leaf, disk, tmp_path):
    assert leaf("file_directory", disk, TMPDIR="/nowhere") == [str(disk)]
    assert leaf("file_directory", "", TMPDIR=disk) == [str(disk)]
    usual = "/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp"
    for nothing in ("/nowhere", "", program_file(tmp_path)):
        assert leaf("file_directory", "", TMPDIR=nothing) == [usual]
    (line,) = leaf("file_directory", tmp_path / "absent")
    assert line.startswith(f"error 6 needed 0 free 0 errno {errno.ENOENT}: making a file")


def program_file(folder):
    path = folder / "file"
    path.write_text("")
    return path


def test_an_error_of_a_file_is_an_oserror():
    error = error_of(6, "writing failed", 0, "", "weights", 4096, 512, errno.ENOSPC)
    assert isinstance(error, BackupError) and isinstance(error, OSError)
    assert (error.errno, error.strerror) == (errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (error.os_error, error.needed, error.free) == (errno.ENOSPC, 4096, 512)
    assert str(error) == "writing failed" and error.tag == "weights"
    plain = error_of(6, "of no file", 0, "", "", 0, 0, 0)
    assert (plain.errno, plain.strerror, plain.os_error) == (None, None, 0)


def test_the_systems_reason_crosses_the_abi():
    with pytest.raises(ConfigError) as caught:
        memsaver.configure(disk_dir="/nowhere")
    assert caught.value.os_error == errno.ENOENT
    with pytest.raises(ConfigError) as caught:
        memsaver.configure(fingerprints="maybe")
    assert caught.value.os_error == 0
