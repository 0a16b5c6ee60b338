"""Tests system limits: memory, locked memory, descriptors, holes in files, and page sizes.

Each case runs in a separate process. A failing call changes nothing and succeeds after the limit is
lifted.
"""

import textwrap

import pytest
from built_sources import built
from repository import TESTS

pytestmark = pytest.mark.long

FIXTURES = TESTS / "fixtures" / "limits"
MIB = 1 << 20

PRELUDE = """
import errno, os, resource, sys
import memsaver
from simulated_driver import Block, Simulator
from memsaver import simulator

sim = Simulator()
sim.start()

def blocks_in(tag, *sizes, backup=None):
    with memsaver.region(tag, backup=backup):
        return [Block(sim, nbytes, seed) for seed, nbytes in enumerate(sizes, 1)]

def refused(error, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except error as caught:
        assert caught.tag == "t", caught
        return caught
    raise AssertionError(f"not refused: {call} {arguments} {named}")

def works(blocks, **named):
    for block in blocks:
        block.fill(block.seed + 1)
    with memsaver.paused("t", **named):
        assert sim.tag_bytes() == 0
    assert all(block.is_intact() for block in blocks)
    assert sim.violations() == []

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
"""


def code(body):
    return PRELUDE + textwrap.dedent(body)


@pytest.fixture(scope="module")
def other_system():
    """Build a library whose libc functions imitate another system's (see LIMITS_SYSTEM)."""
    return built("system.so", [FIXTURES / "system.c"], libraries=["-ldl"])


# --- control groups -------------------------------------------------------------------------------


def group_v1(limit, usage):
    base = "/sys/fs/cgroup/memory/job"
    return {
        "/proc/self/cgroup": "4:memory:/job\n",
        "/proc/self/mountinfo": "36 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{usage}\n",
        f"{base}/memory.stat": f"total_inactive_file {MIB}\ntotal_active_file 0\n",
    }


def group_v2(limit, usage):
    base = "/sys/fs/cgroup/job"
    return {
        "/proc/self/cgroup": "0::/job\n",
        "/proc/self/mountinfo": "35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{usage}\n",
        f"{base}/memory.stat": f"anon 0\ninactive_file {MIB}\nactive_file 0\n",
    }


@pytest.mark.parametrize("group", [group_v1, group_v2])
@pytest.mark.parametrize("kind", ["host", "pageable"])
def test_a_small_control_group_limits_backups(run_python, tmp_path, group, kind):
    # 256 MiB always stay free, and the file cache counts as free: 8 MiB are available.
    files = group(300 * MIB, (300 - 256 - 8 + 1) * MIB)
    files["/proc/meminfo"] = f"MemTotal: {1 << 30} kB\nMemAvailable: {1 << 30} kB\n"
    for name, text in files.items():
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (limit,) = (tmp_path / "sys").rglob("memory.max" if group is group_v2 else "memory.limit_*")
    run_python(
        code(
            f"""
            blocks = blocks_in("t", 20 << 20, backup={kind!r})
            before = rss()
            error = refused(memsaver.OutOfHostMemoryError, memsaver.pause, "t")
            assert error.needed == 20 << 20 and error.free == 8 << 20, (error.needed, error.free)
            assert {limit.name!r} in str(error) and "300 MiB" in str(error), error
            assert rss() - before < 2 << 20, "refused before a page is touched"
            assert memsaver.state("t") == "mapped" and memsaver.stats().host_bytes == 0
            assert all(block.is_intact() for block in blocks)
            with open({str(limit)!r}, "w") as file:
                print({1 << 40}, file=file)  # the limit is raised while the process runs
            works(blocks)
            """
        ),
        MEMSAVER_TEST_SYSTEM_ROOT=tmp_path,
    )


# --- locked memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "pageable", "disk"])
def test_no_locked_memory_at_all(run_python, tmp_path, kind):
    # The library itself locks no memory. If the driver cannot pin memory, a pause with a backup
    # fails without losing contents, and a pause without a backup works.
    run_python(
        code(
            f"""
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
            blocks = blocks_in("t", 3 << 20, 1000, backup={kind!r})
            works(blocks)
            memsaver.trim(wait=True)
            sim.host_limit(0)
            error = refused(memsaver.OutOfHostMemoryError, memsaver.pause, "t")
            assert error.call == "cuMemHostRegister", error
            assert memsaver.state("t") == "mapped"
            assert all(block.is_intact() for block in blocks)
            assert memsaver.stats().host_bytes == memsaver.stats().disk_bytes == 0
            with memsaver.paused("t", backup="none"):
                pass
            assert all(block.is_zero() for block in blocks)
            sim.host_limit()
            works(blocks)
            """
        ),
        MEMSAVER_DISK_DIR=tmp_path,
        MEMSAVER_FINGERPRINTS="off",
    )


@pytest.mark.parametrize("kind", ["host", "pageable"])
def test_a_process_that_locks_all_of_its_memory(run_python, kind):
    # The 32 GiB of addresses that a backup reserves must not become 32 GiB of memory.
    done = run_python(
        code(
            f"""
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            blocks = blocks_in("t", 3 << 20, backup={kind!r})
            current, future = 1, 2
            if libc.mlockall(current | future) != 0:
                sys.exit(77)
            before = rss()
            works(blocks)
            assert rss() - before < 64 << 20
            held = rss()
            memsaver.trim(wait=True)
            assert held - rss() >= 2 << 20, "the pages go back though they were locked"
            works(blocks)
            """
        ),
        status=None,
    )
    if done.returncode == 77:
        pytest.skip("memory cannot be locked here")
    assert done.returncode == 0, done.stdout + done.stderr


# --- descriptors ----------------------------------------------------------------------------------

DESCRIPTORS = """
    def use_up():
        taken = []
        try:
            while True:
                taken.append(os.dup(2))
        except OSError as error:
            assert error.errno == errno.EMFILE
        return taken

    def close(taken):
        for number in taken:
            os.close(number)

    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    """


@pytest.mark.parametrize("kind", ["host", "pageable", "disk"])
def test_no_descriptor_is_left(run_python, tmp_path, kind):
    run_python(
        code(DESCRIPTORS)
        + textwrap.dedent(
            f"""
            blocks = blocks_in("t", 3 << 20, backup={kind!r})
            physical = sim.tag_bytes()
            taken = use_up()
            # How much memory the system can spare cannot be read, so that none is taken.
            wanted = memsaver.BackupError if {kind!r} == "disk" else memsaver.OutOfHostMemoryError
            error = refused(wanted, memsaver.pause, "t")
            assert "ulimit -n" in str(error), error
            if {kind!r} == "disk":
                assert error.errno == errno.EMFILE
            else:
                assert error.needed >= 3 << 20
            assert memsaver.state("t") == "mapped" and sim.tag_bytes() == physical
            assert blocks[0].bytes() == blocks[0].expected()
            with memsaver.region("other"):  # what needs no file goes on
                simulator.buffer(1 << 20)
            memsaver.stats(), memsaver.ranges("t")
            close(taken)
            memsaver.pause("t")
            taken = use_up()
            if {kind!r} == "pageable":  # a buffer to copy through is memory, too
                refused(memsaver.OutOfHostMemoryError, memsaver.resume, "t")
                assert memsaver.state("t") == "paused" and sim.tag_bytes() == 0
            elif {kind!r} == "host":
                memsaver.resume("t")
            close(taken)
            memsaver.resume("t")
            assert blocks[0].is_intact()
            works(blocks)
            """
        ),
        MEMSAVER_DISK_DIR=tmp_path,
    )


def test_the_first_use_without_a_descriptor(run_python):
    # The driver's library cannot be opened; the call can be repeated after this error.
    run_python(
        """
        import errno, os, resource
        import memsaver
        from memsaver import simulator
        """
        + textwrap.indent(textwrap.dedent(DESCRIPTORS), " " * 8)
        + """
        simulator.control()
        taken = use_up()
        try:
            with memsaver.region("t", backup="host"):
                simulator.buffer(1 << 20)
        except memsaver.MemsaverError as error:
            print(type(error).__name__, error)
        else:
            print("it works without")
        close(taken)
        with memsaver.region("t", backup="host"):
            block = simulator.buffer(1 << 20)
        block.array[0] = b"x"
        with memsaver.paused("t"):
            pass
        assert block.array[0] == b"x"
        """
    )


# --- another system -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "pageable", "disk"])
def test_backups_use_whole_pages_of_64_kib(run_python, other_system, tmp_path, kind):
    # A backup's bounds are whole pages; otherwise the system would not release parts of it.
    run_python(
        code(
            f"""
            def held():
                (row,) = memsaver.stats()["t"]
                return row.host_bytes + row.disk_bytes

            page = 64 << 10
            blocks = blocks_in("t", 66 << 20, 5000, 700, backup={kind!r})
            works(blocks)
            assert held() == (66 << 20) + page
            before = rss()
            del blocks[:2]  # from the device now, from the backup with the next pause
            works(blocks)
            assert held() == page
            if {kind!r} != "disk":
                assert before - rss() >= 64 << 20, "what is counted as given back is"
            """
        ),
        LD_PRELOAD=other_system,
        LIMITS_SYSTEM="large pages",
        MEMSAVER_DISK_DIR=tmp_path,
    )


@pytest.mark.parametrize("kind", ["host", "pageable"])
def test_pages_that_were_locked_meanwhile(run_python, other_system, kind):
    run_python(
        code(
            f"""
            blocks = blocks_in("t", 66 << 20, 3 << 20, backup={kind!r})
            works(blocks)
            before = rss()
            del blocks[0]  # from the device now, from the backup with the next pause
            works(blocks)
            assert memsaver.stats().host_bytes < 5 << 20
            assert before - rss() >= 60 << 20, "what is counted as given back is"
            """
        ),
        LD_PRELOAD=other_system,
        LIMITS_SYSTEM="locked",
    )


def test_a_file_system_without_holes(run_python, other_system, tmp_path):
    # Bytes that the file system does not free stay counted until the whole file is released.
    run_python(
        code(
            f"""
            def on_disk():
                for number in os.listdir("/proc/self/fd"):
                    try:
                        where = os.readlink(f"/proc/self/fd/{{number}}")
                    except OSError:
                        continue
                    if where.startswith({str(tmp_path)!r} + "/"):
                        return os.fstat(int(number)).st_blocks * 512
                return 0

            large, *others = blocks_in("t", 66 << 20, 66 << 20, 2 << 20, backup="disk")
            whole = 134 << 20
            works([large, *others])
            assert memsaver.stats().disk_bytes == whole <= on_disk()
            del large
            for _ in range(2):
                works(others)
                assert memsaver.stats().disk_bytes == whole, "cut, but no smaller"
                assert abs(whole - on_disk()) < 1 << 20
            blocks = blocks_in("t", 66 << 20) + others  # where the file has its blocks still
            works(blocks)
            assert memsaver.stats().disk_bytes == whole, "once, not twice"
            assert memsaver.trim(wait=True) >= whole
            assert memsaver.stats().disk_bytes == on_disk() == 0
            works(blocks)
            """
        ),
        LD_PRELOAD=other_system,
        LIMITS_SYSTEM="no holes",
        MEMSAVER_DISK_DIR=tmp_path,
    )
