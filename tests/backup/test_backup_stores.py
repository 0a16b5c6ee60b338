"""Tests the host memory and disk space that backups use, and errors if memory or space is
insufficient.
"""

import errno
import os
import textwrap

import pytest
from looks import intact, row_of

import memsaver
from memsaver.errors import BackupError, OutOfHostMemoryError

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

PAGE = 4096
MIB = 1 << 20
IN_MEMORY = ["host", "pageable"]
STAGED = ["pageable", "disk"]
STAGING = 16 * MIB  # csrc/core/backup/staging.h: one buffer


def rss():
    """Return this process's resident memory in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pages_of(name):
    """Return the size of the pages that overlap live allocations."""
    pages = set()
    for address, nbytes in memsaver.ranges(name):
        pages.update(range(address // PAGE, (address + nbytes - 1) // PAGE + 1))
    return len(pages) * PAGE


@pytest.fixture(autouse=True)
def nothing_kept():
    """Release backups that earlier tests left, so that they do not affect the test's
    measurements.
    """
    memsaver.trim(wait=True)


# --- host memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*IN_MEMORY, "disk"])
@pytest.mark.parametrize("sizes", [[1], [4097, 3], [66 * MIB], [3 * MIB + 5, 700]], ids=str)
def test_a_backup_uses_the_pages_of_the_saved_blocks(sim, tag, make_blocks, kind, sizes):
    blocks = make_blocks(name := tag(), sizes, backup=kind)
    pages = pages_of(name)
    for _ in range(2):
        memsaver.pause(name)
        held = (row_of(name).host_bytes, row_of(name).disk_bytes)
        assert held == ((0, pages) if kind == "disk" else (pages, 0))
        assert memsaver.stats().host_bytes - held[0] < MIB, "fingerprints, and no buffers"
        if kind == "host":
            assert sim.counts().registered_bytes == memsaver.stats().host_bytes
        memsaver.resume(name)
        assert (row_of(name).host_bytes, row_of(name).disk_bytes) == held
    assert intact(blocks)
    assert memsaver.trim(wait=True) >= pages
    assert row_of(name).host_bytes == row_of(name).disk_bytes == memsaver.stats().host_bytes == 0
    assert sim.counts().registered_bytes == 0


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_host_memory_is_released_to_the_system(sim, tag, make_blocks, kind):
    blocks = make_blocks(name := tag(), [66 * MIB], backup=kind)
    assert intact(blocks)
    before = rss()
    memsaver.pause(name)
    memsaver.resume(name)
    kept = rss()
    memsaver.trim(wait=True)
    assert kept - rss() >= 60 * MIB and rss() < before + 6 * MIB
    assert intact(blocks)


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_a_budget_refuses_before_anything_is_touched(sim, tag, make_blocks, options, kind):
    blocks = make_blocks(name := tag(), [34 * MIB, 3 * MIB], backup=kind)
    with memsaver.paused(name, backup="none"):
        pass
    for block in blocks:
        block.fill(block.seed)
    needed = pages_of(name)
    device = sim.tag_bytes()
    options(host_bytes=needed - PAGE)
    before, registered = rss(), sim.counts().registered_bytes
    with pytest.raises(OutOfHostMemoryError, match="host_bytes") as caught:
        memsaver.pause(name)
    assert caught.value.needed == needed and caught.value.free == needed - PAGE
    assert caught.value.tag == name
    assert rss() - before < 2 * MIB and sim.counts().registered_bytes == registered
    assert row_of(name).host_bytes == 0
    assert memsaver.state(name) == "mapped" and sim.tag_bytes() == device and intact(blocks)
    options(host_bytes=needed + (STAGING if kind == "pageable" else 0))
    for _ in range(2):
        memsaver.pause(name)
        assert row_of(name).host_bytes == needed
        memsaver.resume(name)
        assert intact(blocks)


@pytest.mark.parametrize("kind", STAGED)
def test_one_buffer_is_enough(sim, tag, make_blocks, options, kind):
    # If the budget is too small for all buffers, fewer are used; if it is too small for one, an
    # error is raised.
    blocks = make_blocks(name := tag(), [66 * MIB], backup=kind)
    room = 0 if kind == "disk" else 66 * MIB
    options(host_bytes=room + STAGING - 1)
    with pytest.raises(OutOfHostMemoryError) as caught:
        memsaver.pause(name)
    assert caught.value.needed == STAGING and caught.value.tag == name
    assert memsaver.state(name) == "mapped" and intact(blocks)
    assert row_of(name).host_bytes == row_of(name).disk_bytes == 0
    options(host_bytes=room + STAGING)
    memsaver.pause(name)
    options(host_bytes=room + STAGING - 1)
    with pytest.raises(OutOfHostMemoryError) as caught:
        memsaver.resume(name)
    assert caught.value.needed == STAGING and caught.value.tag == name
    assert memsaver.state(name) == "paused" and sim.tag_bytes() == 0
    options(host_bytes=room + STAGING)
    memsaver.resume(name)
    assert intact(blocks)


def test_the_budget_is_shared_and_released(sim, tag, make_blocks, options):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [4 * MIB], backup="host")
    blocks += make_blocks(second, [6 * MIB], backup="host")
    options(host_bytes=8 * MIB)
    memsaver.pause(first)
    with pytest.raises(OutOfHostMemoryError) as caught:
        memsaver.pause(second)
    assert (caught.value.needed, caught.value.free) == (6 * MIB, 4 * MIB)
    memsaver.resume(first)
    with pytest.raises(OutOfHostMemoryError):
        memsaver.pause(first, second)
    assert memsaver.state(first) == memsaver.state(second) == "mapped"
    memsaver.trim(wait=True)
    memsaver.pause(second)
    memsaver.resume(second)
    assert intact(blocks)


def test_the_budget_from_the_environment_and_a_small_system(run_python, tmp_path):
    (tmp_path / "proc").mkdir()
    meminfo = tmp_path / "proc/meminfo"
    meminfo.write_text(f"MemTotal: {1 << 20} kB\nMemAvailable: {(256 + 4) << 10} kB\n")
    run_python(
        f"""
        import memsaver
        from simulated_driver import Block, Simulator

        sim = Simulator()
        with memsaver.region("t", backup="host"):
            block = Block(sim, 6 << 20, 1)
        sim.start()

        def refused(free, why):
            try:
                memsaver.pause("t")
            except memsaver.OutOfHostMemoryError as error:
                assert error.needed == 6 << 20 and error.free == free, (error, error.free)
                assert why in str(error) and error.tag == "t", error
                assert memsaver.state("t") == "mapped" and block.is_intact()
                assert memsaver.stats()["t"][0].host_bytes == 0
                assert sim.counts().registered_bytes == 0
            else:
                raise AssertionError("not refused")

        refused(3 << 20, "MEMSAVER_HOST_BYTES")
        memsaver.configure(host_bytes="64MiB")
        refused(4 << 20, "MemAvailable")
        with open({str(meminfo)!r}, "w") as file:
            print("MemTotal: {1 << 20} kB\\nMemAvailable: {(256 + 6) << 10} kB", file=file)
        with memsaver.paused("t"):
            pass
        assert block.is_intact()
        """,
        MEMSAVER_HOST_BYTES="3MiB",
        MEMSAVER_TEST_SYSTEM_ROOT=tmp_path,
    )


def test_pinning_ends_in_the_middle(sim, tag, make_blocks):
    # The first chunk can be pinned, the second cannot: the first is released.
    blocks = make_blocks(name := tag(), [66 * MIB, 3 * MIB], backup="host")
    sim.host_limit(68 * MIB)
    unpinned = sim.calls("cuMemHostUnregister")
    with pytest.raises(OutOfHostMemoryError) as caught:
        memsaver.pause(name)
    assert caught.value.call == "cuMemHostRegister" and caught.value.tag == name
    assert memsaver.state(name) == "mapped" and intact(blocks)
    assert sim.calls("cuMemHostUnregister") > unpinned
    assert row_of(name).host_bytes == 0 and sim.counts().registered_bytes < MIB
    sim.host_limit()
    with memsaver.paused(name):
        pass
    assert intact(blocks)


# --- disk -----------------------------------------------------------------------------------------


def test_disk_space_is_released_when_less_is_saved(sim, tag, on_disk, tmp_path):
    name, blocks, file = on_disk([66 * MIB, 2 * MIB])
    memsaver.resume(name)
    del blocks[0]
    memsaver.pause(name)
    assert os.fstat(file).st_blocks * 512 < 3 * MIB and row_of(name).disk_bytes == 2 * MIB
    memsaver.resume(name)
    assert intact(blocks)


def test_a_directory_that_vanished(sim, tag, make_blocks, options, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    options(disk_dir=folder)
    blocks = make_blocks(name := tag(), [3 * MIB], backup="disk")
    memsaver.pause(name)
    os.rmdir(folder)
    memsaver.resume(name)  # the file still exists
    memsaver.pause(name)
    memsaver.resume(name)
    assert intact(blocks)
    memsaver.trim(wait=True)
    with pytest.raises(BackupError, match="disk_dir") as caught:
        memsaver.pause(name)
    assert caught.value.errno == errno.ENOENT and caught.value.tag == name
    assert memsaver.state(name) == "mapped" and intact(blocks)
    options(disk_dir=tmp_path)
    with memsaver.paused(name):
        pass
    assert intact(blocks)


FULL = """
    import errno, resource
    import memsaver
    from simulated_driver import Block, Simulator

    sim = Simulator()
    with memsaver.region("t", backup="disk"):
        blocks = [Block(sim, n, n) for n in (66 << 20, 3 << 20)]
    device = sim.physical()

    def refused(number):
        try:
            memsaver.pause("t")
        except memsaver.BackupError as error:
            assert error.errno == number and error.tag == "t" and error.needed > 0, error
            return error
        raise AssertionError("not refused")

    def check():
        assert memsaver.state("t") == "mapped" and sim.physical() == device
        assert all(b.is_intact() for b in blocks)
        memsaver.trim(wait=True)
        assert sim.counts().registered_bytes == memsaver.stats().host_bytes == 0
        assert memsaver.stats().disk_bytes == 0 == sim.counts().violations
"""


def test_a_limit_of_file_sizes(run_python):
    run_python(
        FULL
        + """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65 << 20, before[1]))
    assert "ulimit -f" in str(refused(errno.EFBIG))
    assert memsaver.stats().disk_bytes == 0
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    device = sim.physical()
    check()
    with memsaver.paused("t"):
        pass
    assert all(b.is_intact() for b in blocks)
    """
    )


def test_a_full_disk_is_an_error_and_leaves_tags_mapped(sim, tmp_path, run_python):
    # Uses a separate file system of 16 MiB, in a separate namespace.
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            FULL
            + """
    error = refused(errno.ENOSPC)
    assert memsaver.stats().disk_bytes == 0
    assert error.free <= 16 << 20 and "free disk space" in str(error), error
    check()
    (small,) = [b for b in blocks if b.nbytes < 9 << 20]
    blocks[:] = [small]
    with memsaver.paused("t"):
        pass
    device = sim.physical()
    check()
    """
        )
    )
    code = f"""
        import subprocess, sys
        mount = "mount -t tmpfs -o size=16m none {tmp_path} && exec "
        for namespace in (["unshare", "-m"], ["unshare", "-rm"]):
            probe = [*namespace, "sh", "-c", mount + "true"]
            if subprocess.run(probe, capture_output=True).returncode == 0:
                script = [sys.executable, "-c", open({str(script)!r}).read()]
                run = [*namespace, "sh", "-c", mount + '"$@"', "sh", *script]
                sys.exit(subprocess.run(run).returncode)
        sys.exit(77)
    """
    done = run_python(code, status=None, MEMSAVER_DISK_DIR=tmp_path)
    if done.returncode == 77:
        pytest.skip("a small file system cannot be mounted")
    assert done.returncode == 0, done.stdout + done.stderr
