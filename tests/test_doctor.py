"""`memsaver doctor`: what it finds, what it says to do, how it looks, and that it harms nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memsaver
from memsaver.bare_driver import BareDriver
from memsaver.cli import checks
from memsaver.cli.checks import disk, driver, frameworks, host, nccl, preloading
from memsaver.cli.checks import options as options_module
from memsaver.cli.checks.control_groups import memory_limits
from memsaver.cli.sizes import gigabytes, parse_bytes
from memsaver.errors import ConfigError, NotLoadedError
from memsaver.native import _C, LIBRARY_DIR
from memsaver.text import size_text

ROOT = Path(__file__).parent.parent
SIM = {"MEMSAVER_DRIVER": "sim"}


def run_doctor(*arguments, cwd=None, **env):
    """The command in a process of its own, with these variables beside the usual ones."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MEMSAVER_", "NCCL_"))}
    command = [sys.executable, "-m", "memsaver", "doctor", *arguments]
    environment = {**kept, "PYTHONPATH": str(LIBRARY_DIR.parent), **SIM, **env}
    return subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60
    )


def of(findings, name):
    (found,) = [finding for finding in findings if finding.name == name]
    return found


@pytest.fixture
def plain(monkeypatch):
    """An environment without variables that the checks look at; gives its monkeypatch."""
    prefixes = ("MEMSAVER_", "NCCL_", "PYTORCH_", "SGLANG_", "LD_", "TMPDIR", "TORCH_", "CUDA_")
    for name in list(os.environ):
        if name.startswith(prefixes) and name not in ("MEMSAVER_DRIVER", "LD_LIBRARY_PATH"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_CONF_FILE", "/nonexistent")
    return monkeypatch


@pytest.fixture
def system(plain, tmp_path):
    """A system of files: `system({"/proc/meminfo": "..."})`."""
    plain.setenv("MEMSAVER_TEST_SYSTEM_ROOT", str(tmp_path))

    def make(files):
        for name, text in files.items():
            file = tmp_path / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return make


# --- the command ----------------------------------------------------------------------------------


def test_the_findings_as_json():
    done = run_doctor("--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert list(found) == ["schema", "memsaver", "status", "counts", "findings"]
    assert (found["schema"], found["memsaver"]) == (1, memsaver.__version__)
    assert found["status"] == "warned"  # the simulated driver is
    assert list(found["counts"]) == ["good", "warned", "bad"]
    assert sum(found["counts"].values()) == len(found["findings"])
    for row in found["findings"]:
        assert list(row) == ["subject", "name", "level", "text", "advice", "data"]
        assert row["level"] in ("good", "warned", "bad") and row["name"] and row["text"]
        assert row["level"] == "good" or row["advice"], row
        assert "could not be checked" not in row["text"]
    names = [row["name"] for row in found["findings"]]
    assert len(set(names)) == len(names)
    assert {row["subject"] for row in found["findings"]} == set(checks.SUBJECTS)
    by_name = {row["name"]: row for row in found["findings"]}
    assert by_name["driver"]["data"]["simulated"] is True
    assert by_name["device 0"]["data"]["bytes"] == 80 << 30
    assert by_name["device 0 VMM"]["data"] == {"supported": True}
    assert by_name["host memory budget"]["data"]["bytes"] > 0
    assert by_name["option share_bytes"]["data"] == {"value": str(512 << 20), "source": "default"}


def test_without_a_driver_the_rest_is_still_looked_at():
    done = run_doctor("--json", MEMSAVER_DRIVER="/nonexistent.so")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    bad = [row for row in found["findings"] if row["level"] == "bad"]
    assert [row["name"] for row in bad] == ["driver"] and found["status"] == "bad"
    assert "/nonexistent.so" in bad[0]["text"] and "MEMSAVER_DRIVER=sim" in bad[0]["advice"]
    assert {row["subject"] for row in found["findings"]} == set(checks.SUBJECTS) - {"devices"}


def test_an_empty_environment():
    script = Path(sys.executable).with_name("memsaver")
    command = [script] if script.exists() else [sys.executable, "-m", "memsaver"]
    done = subprocess.run(
        [*command, "doctor"], env={}, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (0, 1) and done.stderr == ""
    assert "NCCL_GRAPH_REGISTER" in done.stdout and re.search(r"\d+ good", done.stdout)
    assert "could not be checked" not in done.stdout


@pytest.mark.parametrize("columns", [80, 140])
def test_its_look(columns, tmp_path):
    missing = tmp_path / ("a-rather-long-name-" * 6) / "lib.so"
    env = {"LD_PRELOAD": str(missing), "COLUMNS": str(columns)}
    done = run_doctor(**env)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in done.stdout and "\x1b" not in done.stdout
    for subject in checks.SUBJECTS:
        assert subject in lines
    assert any(line.startswith(" ✓ device 0 VMM ") for line in lines)
    assert any(line.startswith(" ! driver ") for line in lines)
    assert "→ unset MEMSAVER_DRIVER to use a GPU" in done.stdout
    assert "a-rather-long-name-" in done.stdout
    assert re.fullmatch(r"\d+ good, \d+ warned, 0 bad", lines[-1])


def test_what_is_bad_is_said_again_at_the_end():
    done = run_doctor(MEMSAVER_DRIVER="/nonexistent.so", MEMSAVER_SHARE_BYTES="lots")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith(" 2 bad: driver, option share_bytes")


def test_colours_are_for_those_who_want_them():
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert colour.search(run_doctor(FORCE_COLOR="1").stdout)
    assert not colour.search(run_doctor(FORCE_COLOR="1", NO_COLOR="1").stdout)


def test_an_output_of_plain_ascii():
    done = run_doctor(PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.isascii()
    assert " + device 0 VMM" in done.stdout and "-> unset MEMSAVER_DRIVER" in done.stdout


def test_it_starts_no_context_and_imports_no_framework(run_python):
    done = run_python(
        """
        import sys
        from memsaver.cli import checks
        from memsaver import simulator
        found = checks.check_all()
        library = simulator.control()
        print(library.sim_calls(b"cuInit"), library.sim_calls(b"cuDevicePrimaryCtxRetain"))
        print([name for name in ("torch", "sglang", "vllm", "rich.table") if name in sys.modules])
        """
    )
    calls, frameworks_imported = done.stdout.splitlines()
    assert calls.split()[0] != "0" and calls.split()[1] == "0"
    assert frameworks_imported == "[]"


def test_a_check_that_fails_hides_no_other(plain):
    def fail():
        raise RuntimeError("of all things")

    plain.setitem(checks.SUBJECTS, "NCCL", fail)
    found = checks.check_all()
    assert list(found) == list(checks.SUBJECTS)
    (finding,) = found["NCCL"]
    assert finding.level == "warned" and "of all things" in finding.text


# --- the driver and its devices -------------------------------------------------------------------


def test_a_missing_driver(plain):
    plain.setattr(driver, "BareDriver", raising(NotLoadedError("no libcuda.so.1")))
    (found,) = driver.check_driver()
    assert found.level == "bad" and "no libcuda.so.1" in found.text
    assert driver.check_devices() == []


def raising(error):
    def raise_it(*arguments):
        raise error

    return raise_it


class FakeDriver:
    """A driver of a real GPU, as its calls would answer."""

    name, simulated = "libcuda.so.1", False

    def __init__(self, version=13000, count=1, **attributes):
        self.version, self.count = version, count
        self.attributes = {18: 0, 20: 0, 75: 9, 76: 0, 102: 1, 110: 1, 116: 1}
        self.attributes |= {int(name[1:]): value for name, value in attributes.items()}

    def device_count(self):
        return self.count

    def device_name(self, device):
        return "NVIDIA H200"

    def total_bytes(self, device):
        return 141 << 30

    def attribute(self, device, number):
        return self.attributes[number]


@pytest.mark.parametrize(
    ("text", "cuda", "level"),
    [
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", 13000, "good"),
        ("NVIDIA UNIX x86_64 Kernel Module  525.60.13  Wed Nov 30", 12000, "good"),
        ("NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Nov 30", 12020, "bad"),
        ("", 11080, "bad"),
        ("", 12040, "good"),
    ],
)
def test_versions_of_the_driver(system, text, cuda, level):
    system({"/proc/driver/nvidia/version": f"NVRM version: {text}\nGCC version: 12.2.0\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "BareDriver", lambda: FakeDriver(cuda))
        (found,) = driver.check_driver()
    assert found.level == level
    number = re.search(r"\d{3}\.[\d.]+", text)
    assert found.data["version"] == (number[0] if number else None)
    assert level == "good" or "525 or newer" in found.advice


@pytest.mark.parametrize(
    ("attributes", "name", "level", "says"),
    [
        ({}, "device 0", "good", "NVIDIA H200, 141 GiB, compute capability 9.0"),
        ({"a20": 2}, "device 0", "bad", "prohibited"),
        ({"a20": 3}, "device 0", "warned", "EXCLUSIVE_PROCESS"),
        ({"a18": 1}, "device 0", "warned", "the host's"),
        ({"a75": 6}, "device 0", "warned", "no fingerprints"),
        ({"a102": 0}, "device 0 VMM", "bad", "not supported"),
        ({"a110": 0}, "device 0 RDMA", "warned", "not for memory of regions"),
        ({"a110": 0, "a116": 0}, "device 0 RDMA", "good", "not supported"),
        ({"count": 0}, "devices", "bad", "none"),
    ],
)
def test_what_devices_can_do(plain, attributes, name, level, says):
    plain.setattr(driver, "BareDriver", lambda: FakeDriver(**attributes))
    found = of(driver.check_devices(), name)
    assert found.level == level and says in found.text
    assert level == "good" or found.advice


def test_a_device_that_does_not_answer_hides_no_other(sim, plain):
    plain.setattr(BareDriver, "device_count", lambda self: 2)
    found = driver.check_devices()  # the simulated driver has one
    assert of(found, "device 0").level == "good"
    assert of(found, "device 1").level == "bad" and "cuDevice" in of(found, "device 1").text


# --- torch and the engines ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.13.0+cpu", "good"), ("2.7.1", "warned"), ("2.5.1", "bad"), (None, "warned")],
)
def test_versions_of_torch(plain, version, level):
    plain.setattr(frameworks, "installed_version", lambda name: version)
    plain.setattr(frameworks, "_written", lambda name: None)
    found = of(frameworks.check_torch(), "torch version")
    assert (found.level, found.data["version"]) == (level, version)


@pytest.mark.parametrize(
    ("build", "cuda", "level"),
    [("13.0", 13000, "good"), ("12.8", 12000, "good"), ("13.0", 12080, "bad"), (None, 0, "warned")],
)
def test_what_torch_was_built_for(plain, build, cuda, level):
    plain.setattr(frameworks, "_cuda_build", lambda version: build)
    plain.setattr(frameworks, "BareDriver", lambda: FakeDriver(cuda))
    assert of(frameworks.check_torch(), "torch CUDA build").level == level


def test_the_build_is_read_from_the_text_of_torch(plain, tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (folder / "version.py").write_text(
        "__version__ = '2.9.0'\ncuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n"
    )
    plain.delitem(sys.modules, "torch", raising=False)
    plain.syspath_prepend(tmp_path)
    assert frameworks._cuda_build("2.9.0") == "12.9"
    plain.setattr(frameworks, "installed_version", lambda name: None)  # a folder on the path
    assert of(frameworks.check_torch(), "torch version").data == {"version": "2.9.0"}
    (folder / "version.py").write_text("cuda: Optional[str] = None\n")
    assert frameworks._cuda_build("2.9.0") is None
    assert frameworks._cuda_build("2.9.0+cu130") == "13.0"


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        ({}, "good", "no settings"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "good", "regions work with it"),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "MEMSAVER_TAG": "trainer"},
            "bad",
            "no hook sees it",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "MEMSAVER_TAG": "trainer"},
            "good",
            "False",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "bad", "memory pools"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "good", "max_split_size_mb:64"),
    ],
)
def test_settings_of_torchs_allocator(plain, env, level, says):
    for name, value in env.items():
        plain.setenv(name, value)
    found = of(frameworks._allocator_settings(), "torch allocator")
    assert found.level == level and says in found.text


def test_torch_without_its_cache(plain):
    plain.setattr(frameworks, "installed_version", lambda name: "2.13.0")
    plain.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert of(frameworks.check_torch(), "PYTORCH_NO_CUDA_MEMORY_CACHING").level == "bad"


@pytest.mark.parametrize(
    ("version", "level", "tried"),
    [("0.5.16", "good", True), ("0.5.17", "warned", False), ("0.5.2", "warned", False)],
)
def test_versions_of_sglang(plain, version, level, tried):
    plain.setattr(
        frameworks, "installed_version", lambda name: version if name == "sglang" else None
    )
    found = frameworks.check_engines()
    assert of(found, "SGLang").level == level and of(found, "SGLang").data["tried"] is tried
    assert of(found, "SGLang plugin").level == "good"
    assert of(found, "vLLM").text == "not installed"


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        ({"MEMSAVER_SGLANG": "0"}, "warned", "turned off"),
        ({"MEMSAVER_SGLANG": "maybe"}, "bad", "maybe"),
        ({"SGLANG_PLUGINS": "other"}, "warned", "SGLANG_PLUGINS=other"),
        ({"SGLANG_PLUGINS": "other, memsaver"}, "good", "on"),
        ({"SGLANG_PLATFORM": "other"}, "warned", "SGLANG_PLATFORM=other"),
        ({"MEMSAVER_SGLANG_PRELOAD": "1"}, "good", "preload mode"),
    ],
)
def test_whether_sglang_loads_the_plugin(plain, env, level, says):
    for name, value in env.items():
        plain.setenv(name, value)
    plain.setattr(frameworks, "installed_version", lambda name: "0.5.16")
    found = of(frameworks.check_engines(), "SGLang plugin")
    assert found.level == level and says in found.text


@pytest.mark.parametrize(
    ("version", "says"),
    [("0.0.10+memsaver", "provided by memsaver"), ("0.0.10", "the original")],
)
def test_who_is_torch_memory_saver(plain, version, says):
    plain.setattr(frameworks, "installed_version", lambda name: version)
    found = of(frameworks.check_engines(), "torch_memory_saver")
    assert says in found.text and found.data["is_memsaver"] == ("memsaver" in version)


# --- preloading and NCCL --------------------------------------------------------------------------


OURS = str(LIBRARY_DIR / "libmemsaver_preload.so")


@pytest.fixture
def libraries(tmp_path):
    """Files that stand for libraries: of another installation, with and without its core."""
    for folder in ("whole", "half"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libmemsaver_preload.so").touch()
    (tmp_path / "whole" / "libmemsaver.so").touch()
    (tmp_path / "torch_memory_saver_hook_mode_preload_cu12.abi3.so").touch()
    (tmp_path / "libjemalloc.so.2").touch()
    return tmp_path


def test_the_order_of_what_is_preloaded(plain, libraries):
    allocator = libraries / "libjemalloc.so.2"
    plain.setenv("LD_PRELOAD", f"{allocator}:{OURS} libasan.so")
    found = preloading.check_preloading()
    assert [finding.name for finding in found] == ["preloaded"] and found[0].level == "good"
    rows = [(row["path"], row["kind"]) for row in found[0].data["libraries"]]
    assert rows == [(str(allocator), "other"), (OURS, "memsaver"), ("libasan.so", "other")]
    text = found[0].text
    assert text.index("jemalloc") < text.index("(memsaver)") < text.index("libasan")


def test_nothing_is_preloaded(plain):
    (found,) = preloading.check_preloading()
    assert (found.level, found.text, found.data) == ("good", "nothing", {"libraries": []})


def test_what_the_system_preloads_comes_last(system, libraries):
    system({"/etc/ld.so.preload": "/lib/first.so\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", OURS)
        found = preloading.check_preloading()
    paths = [row["path"] for row in of(found, "preloaded").data["libraries"]]
    assert paths == [OURS, "/lib/first.so"]


def test_two_savers_in_one_process(plain, libraries):
    theirs = libraries / "torch_memory_saver_hook_mode_preload_cu12.abi3.so"
    plain.setenv("LD_PRELOAD", f"{theirs}:{OURS}")
    plain.setattr(preloading, "installed_version", lambda name: "0.0.10")
    found = preloading.check_preloading()
    assert of(found, "preloaded").level == "bad" and "the first has it" in found[0].text
    assert of(found, f"preloaded {theirs.name}").level == "warned"
    plain.setattr(preloading, "installed_version", lambda name: "0.0.10+memsaver")
    assert [finding.level for finding in preloading.check_preloading()] == ["good"]


@pytest.mark.parametrize(
    ("entry", "level", "says"),
    [
        ("whole/libmemsaver_preload.so", "bad", "another installation's"),
        ("no/such.so", "warned", "does not exist"),
    ],
)
def test_an_entry_that_is_wrong(plain, libraries, entry, level, says):
    plain.setenv("LD_PRELOAD", str(libraries / entry))
    found = of(preloading.check_preloading(), f"preloaded {Path(entry).name}")
    assert found.level == level and says in found.text and found.advice


def test_hooks_without_their_core(plain, libraries):
    plain.setattr(preloading, "LIBRARY_DIR", libraries / "half")
    plain.setenv("LD_PRELOAD", str(libraries / "half" / "libmemsaver_preload.so"))
    found = of(preloading.check_preloading(), "preloaded libmemsaver_preload.so")
    assert found.level == "bad" and "libmemsaver.so is missing" in found.text


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        ({"MEMSAVER_TAG": "trainer"}, "warned", "nothing of memsaver is preloaded"),
        ({"MEMSAVER_TAG": "trainer", "LD_PRELOAD": OURS}, "good", "backup none"),
        ({"MEMSAVER_BACKUP": "host"}, "warned", "without MEMSAVER_TAG"),
        ({"MEMSAVER_TAG": "t", "MEMSAVER_BACKUP": "tape"}, "bad", "tape"),
    ],
)
def test_the_processs_own_tag(plain, env, level, says):
    for name, value in env.items():
        plain.setenv(name, value)
    found = of(preloading.check_preloading(), "process tag")
    assert found.level == level and says in found.text


def test_a_preloaded_process_says_so():
    done = run_doctor("--json", LD_PRELOAD=OURS, MEMSAVER_TAG="all", MEMSAVER_BACKUP="host")
    rows = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    assert rows["process tag"]["data"] == {"tag": "all", "backup": "host"}
    assert rows["preloaded"]["data"]["libraries"] == [{"path": OURS, "kind": "memsaver"}]


@pytest.mark.parametrize(
    ("env", "name", "level", "value"),
    [
        ({}, "NCCL_GRAPH_REGISTER", "good", None),
        ({"NCCL_GRAPH_REGISTER": "0"}, "NCCL_GRAPH_REGISTER", "good", "0"),
        ({"NCCL_GRAPH_REGISTER": "1"}, "NCCL_GRAPH_REGISTER", "warned", "1"),
        ({"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE", "good", "0"),
        ({"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE", "good", "1"),
        ({nccl.REGISTER_HOOK: "1"}, nccl.REGISTER_HOOK, "warned", "1"),
    ],
)
def test_variables_of_nccl(plain, env, name, level, value):
    for variable, text in env.items():
        plain.setenv(variable, text)
    found = of(nccl.check_nccl(), name)
    assert (found.level, found.data["value"]) == (level, value)


def test_files_of_nccl_count_less_than_the_environment(plain, tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("# registers\nNCCL_GRAPH_REGISTER=1 # all\nNCCL_NVLS_ENABLE = 0\n")
    plain.setenv("NCCL_CONF_FILE", str(file))
    found = of(nccl.check_nccl(), "NCCL_GRAPH_REGISTER")
    assert found.level == "warned" and str(file) in found.text
    plain.setenv("NCCL_GRAPH_REGISTER", "0")
    found = nccl.check_nccl()
    assert of(found, "NCCL_GRAPH_REGISTER").level == "good"
    assert of(found, "NCCL_NVLS_ENABLE").data == {"value": "0", "source": str(file)}


# --- the host, the disk, the options --------------------------------------------------------------


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


def test_the_directory_of_backups(options, tmp_path):
    options(disk_dir=str(tmp_path))
    found = disk.check_disk()
    assert of(found, "disk_dir").data["directory"] == os.path.realpath(tmp_path)
    assert of(found, "disk_dir").data["is_default"] is False
    facts = os.statvfs(tmp_path)
    free = of(found, "disk_dir space").data["free_bytes"]
    assert abs(free - facts.f_bavail * facts.f_frsize) < 1 << 30
    assert list(tmp_path.iterdir()) == []


def test_the_default_directory(plain, tmp_path):
    plain.setenv("TMPDIR", str(tmp_path))
    assert of(disk.check_disk(), "disk_dir").data["directory"] == str(tmp_path)
    plain.setenv("TMPDIR", str(tmp_path / "missing"))
    assert of(disk.check_disk(), "disk_dir").data["directory"] in ("/var/tmp", "/tmp")


def test_a_directory_in_memory(system, tmp_path):
    system({"/proc/self/mountinfo": f"1 0 0:1 / {tmp_path} rw - tmpfs tmpfs rw\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        found = of(disk.check_disk(), "disk_dir")
    assert found.level == "warned" and "held in memory" in found.advice


def test_a_file_system_without_private_files_or_direct_io(plain, tmp_path):
    plain.setenv("TMPDIR", str(tmp_path))
    real = os.open

    def refuse_unnamed(path, flags, *mode, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not supported")
        return real(path, flags, *mode, **named)

    plain.setattr(os, "open", refuse_unnamed)
    plain.setattr(os, "pwritev", raising(OSError(22, "invalid")))
    found = disk.check_disk()
    assert of(found, "disk_dir privacy").level == "warned"
    assert of(found, "disk_dir direct I/O").data == {"direct": False}
    assert list(tmp_path.iterdir()) == []


def test_options_and_where_they_are_from(tmp_path):
    done = run_doctor(
        "--json",
        MEMSAVER_SHARE_BYTES="256MiB",
        MEMSAVER_MARGIN_BYTES="lots",
        MEMSAVER_DISK_DIR=str(tmp_path / "missing"),
        MEMSAVER_POISON="1",
        MEMSAVER_HOSTBYTES="1GiB",
    )
    assert done.returncode == 1
    rows = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    share = rows["option share_bytes"]
    assert share["data"] == {"value": str(256 << 20), "source": "environment"}
    assert share["text"] == "256 MiB, from MEMSAVER_SHARE_BYTES"
    assert (
        rows["option margin_bytes"]["level"] == "bad"
        and "lots" in rows["option margin_bytes"]["text"]
    )
    assert rows["disk_dir"]["level"] == rows["option disk_dir"]["level"] == "bad"
    assert rows["option poison"]["level"] == "warned"
    assert rows["MEMSAVER_HOSTBYTES"]["advice"] == "did you mean MEMSAVER_HOST_BYTES?"
    assert rows["option slab_bytes"]["data"]["source"] == "default"


def test_every_option_and_variable_is_known():
    with pytest.raises(ConfigError) as caught:
        _C.option("")
    listed = re.findall(r"'(\w+)'", str(caught.value))
    assert sorted(listed) == sorted(options_module.OPTIONS)
    read = re.compile(r"""["'](MEMSAVER_[A-Z_]+)["']""")
    sources = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    sources += [*(ROOT / "memsaver").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    named = {name for path in sources for name in read.findall(path.read_text())}
    known = {f"MEMSAVER_{name.upper()}" for name in options_module.OPTIONS}
    known |= {*options_module.OTHER_VARIABLES, *options_module.BUILD_VARIABLES}
    assert named <= known


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1 << 20, "1 MiB"),
        (1280 << 20, "1.25 GiB"),
        (100 << 30, "100 GiB"),
        (25 << 29, "12.5 GiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_sizes_as_people_read_them(nbytes, text):
    assert size_text(nbytes) == text


def test_sizes_as_people_write_them():
    assert [parse_bytes(text) for text in ("16GiB", "1 KiB", "77")] == [16 << 30, 1024, 77]
    for text in ("", "GiB", "-1", "1.5GiB", "3x", "1GB"):
        with pytest.raises(ValueError, match="is no size"):
            parse_bytes(text)
    assert [gigabytes(rate) for rate in (5.5e9, 55e9, 3.4567e12)] == ["5.50", "55.0", "3,457"]
