"""Tests trainers and child processes that preload torch_memory_saver's library."""

import os
import subprocess
import zipfile

import pytest
from dropin_preload import LIBRARIES

from memsaver._runtime.native import LIBRARY_DIR


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_whole_process_is_a_region(preloaded, library):
    """slime and miles start their trainers as whole-process regions."""
    preloaded(
        """
        assert memsaver.is_preloaded()
        first = filled(1)
        with saver.disable():
            outside = caller.malloc(MIB)
            assert outside >> 56 == 1  # from the runtime
        with saver.region("other"):
            other = filled(2)
        with saver.region("default", enable_cpu_backup=False):
            plain = filled(3)
        cdll = saver._impl._binary_wrapper.cdll
        assert cdll.tms_get_interesting_region() and cdll.tms_get_enable_cpu_backup()
        assert cdll.tms_get_current_tag() == b"default"
        cdll.tms_set_interesting_region(False)
        assert caller.malloc(MIB) >> 56 == 1
        cdll.tms_set_interesting_region(True)
        before = used()
        saver.pause("default")
        assert before - used() == 8 * MIB
        assert has(other, 2)
        with saver.disable():
            assert caller.malloc(MIB) >> 56 == 1
        saver.resume("default")
        assert has(first, 1) and has(plain, 0) and has(other, 2)
        saver.pause(), saver.resume()
        assert has(first, 1) and has(other, 0)
        """,
        library,
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


def test_the_memory_of_a_whole_process_can_be_shareable(preloaded):
    """A trainer in slime can let an engine read the trainer's weights in place."""
    preloaded(
        """
        import ctypes
        from memsaver._runtime.native import _C
        early = filled(1)
        with memsaver.region("default", shareable=True):
            pass
        late = filled(2)
        assert _C.exportable(ctypes.addressof(late), len(late))
        try:
            _C.exportable(ctypes.addressof(early), len(early))
            raise AssertionError("its memory was created without a handle")
        except memsaver.SharingError as error:
            assert "before the tag became shareable" in str(error)
        saver.pause(), saver.resume()
        for array, byte in ((early, 1), (late, 2)):
            assert has(array, byte) and _C.exportable(ctypes.addressof(array), len(array))
        """,
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


@pytest.mark.parametrize(
    "backup, env",
    [
        (None, {}),
        (None, {"ENABLE": "0"}),
        (None, {"ENABLE": "maybe"}),
        ("none", {"ENABLE": "1"}),
        ("none", {"ENABLE": "TRUE", "ENABLE_CPU_BACKUP": "0"}),
        ("host", {"ENABLE": "TRUE", "ENABLE_CPU_BACKUP": "yes"}),
        ("pageable", {"ENABLE": "1", "ENABLE_CPU_BACKUP": "1", "CPU_BACKUP_BACKEND": "mmap"}),
        ("disk", {"ENABLE": "1", "ENABLE_CPU_BACKUP": "0", "ENABLE_DISK_BACKUP": "true"}),
    ],
)
def test_a_process_is_a_region_with_a_backup_only_if_configured(preloaded, backup, env):
    preloaded(
        f"""
        backup = {backup!r}
        assert memsaver.is_preloaded()
        with memsaver.region("mine", backup="host"):
            mine = filled(2)
        if backup is None:
            assert caller.malloc(MIB) >> 56 == 1  # from the runtime
            memsaver.pause(), memsaver.resume()
        else:
            first = filled(1)
            assert memsaver.stats()["default"][0].backup == backup
            saver.pause(), saver.resume()
            assert has(first, int(backup != "none"))
        assert has(mine, 2)
        """,
        **{f"TMS_INIT_{name}": value for name, value in env.items()},
    )


def test_a_child_of_a_whole_process_can_be_an_ordinary_one(preloaded):
    """In a child process without TMS_INIT_ENABLE, the variables that the parent received are
    removed.
    """
    preloaded(
        """
        assert os.environ["MEMSAVER_TAG"] == "default"
        report = "import os; print([n for n in os.environ if n.startswith('MEMSAVER_')])"
        child = lambda **env: subprocess.run([sys.executable, "-c", report], check=True,
            capture_output=True, text=True, env={**os.environ, **env}).stdout
        assert "MEMSAVER_TAG" in child()
        assert "MEMSAVER_TAG" not in child(TMS_INIT_ENABLE="0")
        assert "MEMSAVER_BACKUP" not in child(TMS_INIT_ENABLE="0")
        """,
        TMS_INIT_ENABLE="1",
    )


def test_memsavers_own_variables_come_first(preloaded):
    preloaded(
        """
        first = filled(1)
        assert [row.tag for row in memsaver.stats().tags] == ["mine"]
        saver.pause("mine"), saver.resume()
        assert has(first, 1)
        """,
        TMS_INIT_ENABLE="1",
        MEMSAVER_TAG="mine",
        MEMSAVER_BACKUP="host",
    )


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_whole_process_has_no_expandable_segments(preloaded, variable):
    setting = "a:1,expandable_segments : True,b:2,EXPANDABLE_SEGMENTS:true,c:True"
    code = f"assert os.environ[{variable!r}] == {{!r}}, os.environ[{variable!r}]"
    off = "a:1,expandable_segments : False,b:2,EXPANDABLE_SEGMENTS:False,c:True"
    preloaded(code.format(off), TMS_INIT_ENABLE="1", **{variable: setting})
    preloaded(code.format(setting), **{variable: setting})


@pytest.mark.preloads
def test_configure_subprocess(run_dropin, runtime):
    """Child processes are preloaded, with or without a process tag, and the environment is
    restored.
    """
    run_dropin(
        """
        child = '''
        import os
        import memsaver
        from child import Caller
        assert memsaver.is_preloaded()
        inside = Caller("caller.so").malloc(1 << 20) >> 56 == 0
        assert inside == bool(os.environ.get("TMS_INIT_ENABLE"))
        '''.replace("        ", "")
        def start(**env):
            subprocess.run([sys.executable, "-c", child], check=True, env={**os.environ, **env})
        with configure_subprocess():
            first = os.environ["LD_PRELOAD"].split(":")
            assert "torch_memory_saver" in first[0]
            start()
            start(TMS_INIT_ENABLE="1")
        assert "LD_PRELOAD" not in os.environ
        os.environ["LD_PRELOAD"] = "/lib/a.so:/lib/b.so"
        def fail():
            with configure_subprocess():
                inside = os.environ["LD_PRELOAD"].split(":")
                assert inside == [*first, "/lib/a.so", "/lib/b.so"]
                with configure_subprocess():
                    assert os.environ["LD_PRELOAD"].split(":") == inside
                raise KeyError
        raises(KeyError, fail)
        assert os.environ.pop("LD_PRELOAD") == "/lib/a.so:/lib/b.so"
        """,
        FIXTURES=str(runtime),
    )


@pytest.mark.long
def test_the_library_finds_memsaver_or_harms_nothing(
    run_dropin, dropin_wheel, dropin_site, tmp_path
):
    """Without memsaver, the library has no effect; Python's error advises setting
    LD_LIBRARY_PATH.
    """
    alone = tmp_path / "alone"
    with zipfile.ZipFile(dropin_wheel) as archive:
        archive.extractall(alone)
    library, paths = str(alone / LIBRARIES[0]), f"{alone}{os.pathsep}{LIBRARY_DIR.parent}"
    env = {"LD_PRELOAD": library, "TMS_INIT_ENABLE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(["/bin/sh", "-c", "echo out; exit 3"], env=env, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"")
    code = """
        from torch_memory_saver.utils import get_binary_path_from_package
        name = "torch_memory_saver_hook_mode_preload"
        message = raises(memsaver.NotLoadedError, get_binary_path_from_package, name)
        assert "LD_LIBRARY_PATH" in message
        assert "preload" in raises(memsaver.NotLoadedError, saver.pause)
        os.environ["LD_LIBRARY_PATH"] = os.path.dirname(memsaver._C.__file__)
        path = get_binary_path_from_package(name)
        child = subprocess.run([sys.executable, "-c", "import memsaver; "
            "assert memsaver.is_preloaded()"], env={**os.environ, "LD_PRELOAD": str(path)})
        assert child.returncode == 0
    """
    run_dropin(code, packages=paths, TMS_INIT_ENABLE="1", LD_PRELOAD=library)


@pytest.mark.long
def test_the_path_of_the_library(run_dropin, dropin_site):
    run_dropin(
        f"""
        import torch_memory_saver
        from torch_memory_saver.utils import change_env, get_binary_path_from_package, is_xpu
        path = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
        assert str(path.parent) == {str(dropin_site)!r} and path.is_file()
        by_hand = os.path.dirname(os.path.dirname(torch_memory_saver.__file__))
        assert by_hand == str(path.parent)
        raises(ValueError, get_binary_path_from_package, "torch_memory_saver_hook_mode_torch")
        from torch_memory_saver.hooks.base import HookUtilBase
        from torch_memory_saver.hooks.mode_preload import HookUtilModePreload
        hooks = HookUtilBase.create(hook_mode="preload")
        assert type(hooks) is HookUtilModePreload and hooks.get_allocator() is None
        name = "torch_memory_saver_hook_mode_preload.abi3.so"
        assert hooks.get_path_binary() == os.path.join(by_hand, name)
        raises(memsaver.ConfigError, HookUtilBase.create, hook_mode="torch")
        raises(NotImplementedError, HookUtilBase().get_path_binary)
        with change_env("A", "1"), change_env("A", "2"):
            assert os.environ["A"] == "2"
        assert "A" not in os.environ and not is_xpu()
        """
    )
