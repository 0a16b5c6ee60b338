"""Tests two installations of memsaver in one process, which share a single library.

The second installation is a copy of this installation. If the version of the copy must differ, the
version is written into the copied library.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import memsaver
from memsaver._memory.preload import preload_env

pytestmark = pytest.mark.long

PACKAGE = Path(find_spec("memsaver").origin).parent
OTHER = "9.9.9"


@pytest.fixture
def other(tmp_path):
    """Create a second installation: `other(version)` returns its package's folder."""

    def make(version=memsaver.__version__):
        folder = tmp_path / f"site-{version}" / "memsaver"
        shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        core = folder / "libmemsaver.so"
        old, new = (b"\0" + text.encode() + b"\0" for text in (memsaver.__version__, version))
        data = core.read_bytes()
        assert data.count(old) == 1 and len(old) == len(new)
        core.write_bytes(data.replace(old, new))
        return folder

    return make


USE = """
import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C
with memsaver.region("t", backup="host"):
    block = simulator.buffer(1 << 20)
block.array[0] = b"x"
with memsaver.paused("t"):
    pass
assert block.array[0] == b"x"
print(memsaver.__version__, memsaver.__file__)
"""


@pytest.mark.parametrize("library", ["libmemsaver.so", "libmemsaver_preload.so"])
def test_a_preloaded_library_of_another_version(run_python, other, library):
    # The library's functions might differ: the package reports it, and the process survives.
    there = other(OTHER)
    done = run_python(
        """
        try:
            import memsaver
        except ImportError as error:
            print("ImportError", error)
        except Exception as error:
            print(type(error).__name__, error)
        """,
        LD_PRELOAD=there / library,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("NotLoadedError ")
    for part in (OTHER, memsaver.__version__, str(there / "libmemsaver.so"), "LD_PRELOAD"):
        assert part in done.stdout


@pytest.mark.parametrize("library", ["libmemsaver.so", "libmemsaver_preload.so"])
def test_a_preloaded_library_of_the_same_version(run_python, other, library):
    done = run_python(USE, LD_PRELOAD=other() / library)
    assert done.stdout.split() == [memsaver.__version__, str(PACKAGE / "__init__.py")]
    assert done.stderr == ""


@pytest.mark.preloads
def test_hooks_stay_out_where_the_library_is_another_versions(run, other):
    # The program's allocations then come from the runtime, as without the hooks.
    env = {"MEMSAVER_DRIVER": "sim", "MEMSAVER_TAG": "t"}
    ours = run(["./program"], env)
    assert "main 0 ours 0" in ours.stdout
    for preloaded in (
        [other(OTHER) / "libmemsaver_preload.so"],
        [other() / "libmemsaver_preload.so", PACKAGE / "libmemsaver_preload.so"],
    ):
        done = run(["./program"], env, preloaded=tuple(map(str, preloaded)))
        assert done.returncode == ours.returncode == 42 and done.stderr == ""
        same = "9.9.9" not in str(preloaded[0])
        whose = "ours" if same else "theirs"
        assert f"main 0 {whose} 0" in done.stdout and "threads 0" in done.stdout


@pytest.mark.preloads
def test_children_get_one_installation(other):
    ours, theirs = PACKAGE / "libmemsaver_preload.so", other() / "libmemsaver_preload.so"
    env = {"LD_PRELOAD": f"/lib/other.so:{theirs} {theirs.parent / 'libmemsaver.so'}"}
    assert preload_env(env=env)["LD_PRELOAD"].split(":") == [str(ours), "/lib/other.so"]
    env = {"LD_PRELOAD": f"{theirs}:/lib/other.so:{ours}"}
    assert preload_env(env=env)["LD_PRELOAD"].split(":") == ["/lib/other.so", str(ours)]


def test_both_packages_in_one_interpreter(run_python, other):
    # Both packages use the first one's library, so that neither treats the other's tags as foreign.
    there = other(OTHER)
    done = run_python(
        USE
        + f"""
import sys
def ours():
    return [name for name in sys.modules if name.split(".")[0] == "memsaver"]
first = {{name: sys.modules.pop(name) for name in ours()}}
sys.path.insert(0, {str(there.parent)!r})
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")
                    and "editable" not in getattr(f, "__name__", "").lower()]
import memsaver as second
print(second.__version__, second.__file__)
assert second.state("t") == "mapped"
with second.paused("t"):
    assert _C.tag_state("t") == second._runtime.native.STATES.index("paused")
for name in ours():
    del sys.modules[name]
sys.modules.update(first)
with memsaver.paused("t"):
    pass
assert block.array[0] == b"x"
"""
    )
    assert done.stderr == ""
    version = memsaver.__version__
    assert done.stdout.splitlines() == [
        f"{version} {PACKAGE / '__init__.py'}",
        f"{version} {there / '__init__.py'}",
    ]
