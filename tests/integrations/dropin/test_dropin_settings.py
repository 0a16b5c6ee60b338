"""Tests the settings of torch_memory_saver with memsaver: properties and TMS_* variables."""

import pytest


def test_hook_mode_can_be_set_until_the_first_use(run_dropin):
    run_dropin(
        """
        assert saver.hook_mode == "preload"
        saver.hook_mode = "torch"
        raises(ValueError, setattr, saver, "hook_mode", "magic")
        with saver.region("a", enable_cpu_backup=True):
            made = block(1)
        assert "first" in raises(memsaver.InvalidStateError, setattr, saver, "hook_mode", "torch")
        assert saver.hook_mode == "torch"
        saver.pause("a"), saver.resume("a")
        assert reads(made, 1)
        """,
        with_torch=True,  # the mode "torch" imports it
    )


def test_the_margin_stays_free(run_dropin):
    run_dropin("""
        free, total = memsaver.device_memory(0)
        assert saver.memory_margin_bytes == 0
        saver.memory_margin_bytes = free - 20 * MIB
        assert saver.memory_margin_bytes == free - 20 * MIB
        with saver.region("a"):
            first = block(1, 16 * MIB)
            raises(memsaver.OutOfDeviceMemoryError, simulator.buffer, 16 * MIB)
            saver.memory_margin_bytes = 0
            second = block(2, 16 * MIB)
        raises(ValueError, setattr, saver, "memory_margin_bytes", -1)
    """)


@pytest.mark.parametrize(
    "how, backend",
    [
        ("default", "pinned"),
        ("default", "mmap"),
        ("true", "mmap"),
        ("false", "pinned"),
        ("environment", "pinned"),
    ],
)
def test_host_memory_after_a_resume(run_dropin, how, backend):
    """A resume releases the backup's host memory; with "mmap", retained backups are an
    exception.
    """
    env = {"TMS_RETAIN_CPU_BACKUP": "no"} if how == "environment" else {}
    kept = how == "true" or (how == "default" and backend == "pinned")
    run_dropin(
        f"""
        how = {how!r}
        assert saver.retain_cpu_backup is False
        if how in ("true", "false"):
            saver.retain_cpu_backup = how == "true"
        assert saver.retain_cpu_backup is (how == "true")
        with saver.region("a", enable_cpu_backup=True, cpu_backup_backend={backend!r}):
            made = block(1, 16 * MIB)
        with saver.region("a"), saver.region("b", enable_cpu_backup=True):
            other = block(2, 4 * MIB)
        host = lambda tag="a": memsaver.stats()[tag][0].host_bytes
        saver.pause("b"), memsaver.resume("b")
        held_by_others = host("b")
        assert held_by_others >= 4 * MIB
        for tag in ("a", None):
            saver.pause("a")
            assert host() >= 16 * MIB
            saver.resume(tag)
            assert (host() >= 16 * MIB) is {kept}, host()
            assert reads(made, 1) and reads(other, 2)
            if tag:
                assert host("b") == held_by_others
        """,
        **env,
    )


@pytest.mark.parametrize("backend", ["pinned", "mmap"])
def test_a_finalizer_resumes_while_the_interpreter_ends(run_dropin, backend):
    """No thread can start during interpreter exit, so the resume must not wait for a new thread."""
    done = run_dropin(f"""
        saver.retain_cpu_backup = False
        with saver.region("a", enable_cpu_backup=True, cpu_backup_backend={backend!r}):
            made = block(1)
        saver.pause("a")

        class Last:
            def __del__(self, saver=saver, made=made, say=os.write):
                saver.resume("a")
                say(1, b"resumed")

        last = Last()
    """)
    assert done.stderr == ""
    assert done.stdout == "resumed"


def test_the_directory_for_backups_is_made_and_used(run_dropin, tmp_path):
    code = """
        with saver.region("a", enable_disk_backup=True):
            made = block(1, 16 * MIB)
        if {named!r}:
            saver.set_disk_backup_dir({named!r})
        folder = {folder!r}
        assert os.path.isdir(folder)
        saver.pause("a")
        open_files = map("/proc/self/fd/{{}}".format, os.listdir("/proc/self/fd"))
        files = [os.readlink(path) for path in open_files if os.path.islink(path)]
        assert [name for name in files if name.startswith(folder)], files
        saver.resume("a")
        assert reads(made, 1)
        raises(ValueError, saver.set_disk_backup_dir, "/proc/nowhere/at/all")
    """
    by_call, by_env = str(tmp_path / "call" / "deep"), str(tmp_path / "env" / "deep")
    run_dropin(code.format(named=by_call, folder=by_call))
    run_dropin(
        code.format(named="", folder=by_env),
        TMS_DISK_BACKUP_DIR=by_env,
        TMS_DISK_BACKUP_CHUNK_MB="64",
    )


def test_the_kind_of_host_memory_from_the_environment(run_dropin):
    run_dropin(
        """
        with saver.region("a", enable_cpu_backup=True):
            first = block(1)
        with saver.region("b", enable_cpu_backup=True, cpu_backup_backend="pinned"):
            second = block(2)
        backups = {row.tag: row.backup for row in memsaver.stats().tags}
        assert backups == {"a": "pageable", "b": "host"}
        """,
        TMS_INIT_CPU_BACKUP_BACKEND="mmap",
    )


@pytest.mark.parametrize(
    "env",
    [
        {"TMS_INIT_ENABLE": "maybe"},
        {"TMS_INIT_ENABLE_CPU_BACKUP": ""},
        {"TMS_RETAIN_CPU_BACKUP": "2"},
        {"TMS_INIT_CPU_BACKUP_BACKEND": "tape"},
        {"TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_INIT_ENABLE_DISK_BACKUP": "1"},
    ],
)
def test_variables_that_mean_nothing_are_errors_at_the_first_use(run_dropin, env):
    run_dropin(
        f"""
        message = raises(ValueError, saver.pause)
        assert {next(iter(env))!r} in message, message
        assert saver._impl is None
        """,
        **env,
    )
