"""Test the SGLang plugin: the memory saver that it installs, in every process of SGLang.

tests/fixtures/sglang_plugins is a fake SGLang, whose processes find the plugin through the entry
points of the installed memsaver.
"""

import importlib
import json
import os
import sys
from contextlib import contextmanager
from importlib.metadata import entry_points

import pytest
from repository import IMPORT_PATH, TESTS
from simulated_driver import Block

import memsaver
from memsaver import ConfigError, InvalidStateError, NotLoadedError
from memsaver._transitions import parts
from memsaver.integrations.engine.policies import Policy
from memsaver.integrations.sglang import settings, versions
from memsaver.integrations.sglang.adapter import MemsaverAdapter
from memsaver.integrations.sglang.imports import when_imported

MIB = 1 << 20
STAND_IN = TESTS / "fixtures" / "sglang_plugins"


# --- the package ----------------------------------------------------------------------------------


@pytest.mark.each_python
def test_the_controller_is_imported_on_first_use(run_python):
    """SGLang's processes load only the plugin."""
    run_python(
        """
import sys
import memsaver.integrations.sglang.plugin
home = "memsaver.integrations.sglang"
assert f"{home}.sleep" not in sys.modules and f"{home}.engines" not in sys.modules
from memsaver.integrations.sglang import *
from memsaver.integrations.sglang.sleep import SleepController as the_one
import memsaver.integrations.sglang as package
assert SleepController is the_one and Status.AWAKE == "awake"
assert set(package.__all__) <= set(dir(package))
for name in package.__all__:
    assert getattr(package, name).__module__.startswith("memsaver.integrations."), name
assert not {"torch", "numpy", "sglang"} & set(sys.modules)
try:
    from memsaver.integrations.sglang import Sleep
except ImportError as error:
    assert "'Sleep'" in str(error)
else:
    raise SystemExit("there is no Sleep")
        """
    )


# --- the adapter ----------------------------------------------------------------------------------


def test_backed_up_contents_return_and_others_are_zero(sim, tag):
    weights, kv = tag("weights"), tag("kv_cache")
    with MemsaverAdapter().region(weights, enable_cpu_backup=True):
        kept = [Block(sim, nbytes, seed) for seed, nbytes in enumerate((3 * MIB, 5000))]
    with MemsaverAdapter().region(tag=kv):
        cache = Block(sim, 4 * MIB, 9)
    saver = MemsaverAdapter()
    saver.pause(kv)
    saver.pause(tag=weights)
    assert not any(sim.accessible(block.address) for block in [*kept, cache])
    assert sim.tag_bytes() == 0
    saver.resume(tag=weights)
    assert all(block.is_intact() for block in kept)
    assert not sim.accessible(cache.address)
    saver.resume(kv)
    assert cache.is_zero()


def test_a_tag_that_was_never_used_is_passed_over(sim, tag):
    """SGLang releases `cuda_graph` even if no graph was captured with it."""
    saver, name = MemsaverAdapter(), tag("cuda_graph")
    assert saver.pause(name) is None
    assert saver.resume(name) is None
    assert name not in {row.tag for row in memsaver.stats().tags}
    with pytest.raises(ConfigError):
        saver.pause("")


def test_doing_it_twice_is_harmless(sim, tag):
    saver, name = MemsaverAdapter(), tag()
    with saver.region(name, enable_cpu_backup=True):
        block = Block(sim, MIB, 1)
    assert saver.resume(name).changes[0].changed is False
    for _ in range(2):
        saver.pause(name)
        assert not sim.accessible(block.address)
    for _ in range(2):
        saver.resume(name)
        assert block.is_intact()


@pytest.mark.parametrize("kept_first", [True, False])
def test_two_policies_in_one_tag(sim, tag, kept_first):
    """A draft model's weights are backed up; the main model's in the same tag are not."""
    saver, name = MemsaverAdapter(), tag("weights")
    blocks = {}
    for keep in (kept_first, not kept_first, kept_first):
        with saver.region(name, enable_cpu_backup=keep):
            blocks.setdefault(keep, []).append(Block(sim, 2 * MIB, len(blocks)))
    both = [*blocks[True], *blocks[False]]
    assert parts.names_of(name)[0] == name and len(parts.names_of(name)) == 2
    saver.pause(name)
    assert not any(sim.accessible(block.address) for block in both)
    rows = [row for beside in parts.names_of(name) for row in memsaver.stats()[beside]]
    saved = sum(row.backup_bytes for row in rows)
    assert saved == sum(block.nbytes for block in blocks[True])
    saver.resume(name)
    assert all(block.is_intact() for block in blocks[True])
    assert all(block.is_zero() for block in blocks[False])
    both.clear()
    blocks.clear()
    memsaver.trim(wait=True)


@pytest.mark.parametrize("other", ["{}:host", "{}:none", "{} (host)"])
def test_parts_of_a_tag_take_no_tag_of_the_program(sim, tag, other):
    saver, name = MemsaverAdapter(), tag("weights")
    other = other.format(name)
    tag.names.append(other)
    with memsaver.region(other, backup="pageable"):
        mine = Block(sim, 2 * MIB, 1)
    for keep in (True, False):
        with saver.region(name, enable_cpu_backup=keep):
            blocks = Block(sim, 2 * MIB, 2)
    assert memsaver.stats()[other][0].backup == "pageable"
    saver.pause(name)
    assert memsaver.state(other) == "mapped" and mine.is_intact()
    saver.resume(name)
    del mine, blocks


def test_two_policies_are_resumed_together_or_not_at_all(sim, tag):
    saver, name = MemsaverAdapter(), tag("weights")
    blocks = []
    for keep in (False, True):
        with saver.region(name, enable_cpu_backup=keep):
            blocks.append(Block(sim, 8 * MIB, 1))
    saver.pause(name)
    free = memsaver.device_memory(0)[0]
    sim.occupy(free - 12 * MIB)
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        saver.resume(name)
    assert [memsaver.state(beside) for beside in parts.names_of(name)] == ["paused"] * 2
    assert sim.tag_bytes() == 0
    sim.occupy(0)
    saver.resume(name)
    assert blocks[0].is_zero() and blocks[1].is_intact()
    del blocks
    memsaver.trim(wait=True)


def test_a_tag_of_the_process_s_own_is_paused_too(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    MemsaverAdapter().pause(name)
    assert not sim.accessible(block.address)
    MemsaverAdapter().resume(name)
    assert block.is_intact()


def test_disable_keeps_memory_out_of_the_tag(sim, tag):
    saver, name = MemsaverAdapter(), tag()
    with saver.region(name):
        inside = Block(sim, MIB, 1)
        with saver.disable(), pytest.raises(InvalidStateError):
            Block(sim, MIB, 2)  # the simulator allocates for regions only
    assert len(memsaver.ranges(name)) == 1
    assert inside.is_intact()


@pytest.mark.parametrize("more", [{}, {"enable_cpu_backup": True}], ids=["0.5.16", "0.5.23"])
def test_graphs_are_captured_in_the_given_tag(sim, tag, monkeypatch, more):
    """The fake capture receives all arguments, and allocates in the given tag."""
    name, pool, stream, graph = tag("cuda_graph"), (0, 7), object(), object()
    seen = []

    @contextmanager
    def capture(cuda_graph, tag, *, backup, pool, stream, capture_error_mode):
        seen.append((cuda_graph, pool, stream, capture_error_mode))
        with memsaver.region(tag, backup=backup):
            yield

    monkeypatch.setattr(memsaver, "graph", capture)
    saver = MemsaverAdapter()
    with saver.cuda_graph(cuda_graph=graph, pool=pool, stream=stream, tag=name, **more):
        block = Block(sim, MIB, 1)
    assert seen == [(graph, pool, stream, "global")]
    saver.pause(name)
    saver.resume(name)
    assert block.is_intact() if more else block.is_zero()


def test_a_graph_on_the_simulator_is_a_clear_error(sim):
    with pytest.raises(NotLoadedError, match="captures a CUDA graph"):
        with MemsaverAdapter().cuda_graph(cuda_graph=object(), pool=None, stream=None):
            pass


def test_other_methods_of_sglangs_saver_interface():
    saver = MemsaverAdapter()
    assert saver.enabled is True
    assert saver.check_validity("release_memory_occupation") is None


@pytest.mark.preloads
def test_children_are_preloaded_only_if_requested(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with MemsaverAdapter().configure_subprocess():
        assert "LD_PRELOAD" not in os.environ
    monkeypatch.setenv("MEMSAVER_SGLANG_PRELOAD", "1")
    with MemsaverAdapter().configure_subprocess():
        assert "libmemsaver_preload.so" in os.environ["LD_PRELOAD"]
    assert "LD_PRELOAD" not in os.environ


# --- every process --------------------------------------------------------------------------------

SCENARIOS = {
    "scheduler": "engine.launch(PATH)",
    "data-parallel": "engine.launch(PATH, data_parallel=True)",
    "actor": "engine.launch_actor(PATH)",
}


@pytest.fixture
def run_sglang(run_python, tmp_path):
    """Run lines in a process with `engine`; return the scheduler's results, and stderr."""
    path = tmp_path / "seen.json"

    def run(lines: str, status: int = 0, **env):
        env.setdefault("PYTHONPATH", os.pathsep.join([str(STAND_IN), IMPORT_PATH]))
        code = f"PATH = {str(path)!r}\nimport sys\nfrom sglang.srt import engine\n{lines}\n"
        for name in ("SGLANG_PLUGINS", "SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
            env.setdefault(name, None)
        for name in ("NCCL_GRAPH_REGISTER", "NCCL_CUMEM_ENABLE"):
            env.setdefault(name, None)
        done = run_python(code, status=status, **env)
        return (json.loads(path.read_text()) if path.exists() else None), done.stderr

    return run


@pytest.mark.each_python
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_process_uses_memsaver(run_sglang, scenario):
    seen, log = run_sglang(SCENARIOS[scenario])
    assert seen == {
        "saver": "MemsaverAdapter",
        "enabled": True,
        "asleep": [[False] * 3] * 4,
        "released": [["cuda_graph", "kv_cache", "weights"]] * 4,
        "awake": [[True] * 3] * 4,
        "simulated": True,
        "preloaded": False,
        "vmm": None if scenario == "actor" else "0",
        "nccl": None,
        "torch": False,
    }
    assert "Traceback" not in log
    # One line for each process with a saver, however many savers it creates.
    lines = [line for line in log.splitlines() if "is SGLang's memory saver in process" in line]
    assert len(lines) == len(set(lines)) == (1 if scenario == "actor" else 2)


@pytest.mark.preloads
@pytest.mark.parametrize("scenario", ["scheduler", "data-parallel"])
def test_preload_mode_if_requested(run_sglang, scenario):
    seen, log = run_sglang(SCENARIOS[scenario], MEMSAVER_SGLANG_PRELOAD="1")
    assert seen["preloaded"] and seen["awake"] == [[True] * 3] * 4
    assert "preload mode" in log


@pytest.mark.parametrize(
    ("scenario", "env"),
    [
        ("scheduler", {"MEMSAVER_SGLANG": "0"}),
        ("data-parallel", {"MEMSAVER_SGLANG": "off"}),
        ("actor", {"MEMSAVER_SGLANG": "0"}),
        ("scheduler", {"SGLANG_PLUGINS": "another"}),
        ("actor", {"SGLANG_PLUGINS": "another"}),
    ],
)
def test_a_plugin_that_is_turned_off_does_nothing(run_sglang, scenario, env):
    seen, log = run_sglang(SCENARIOS[scenario], status=1, **env)
    assert seen is None
    assert "torch_memory_saver is not installed" in log  # SGLang's own answer
    # Indented lines are a traceback's frames, with the paths of files.
    said = [line for line in log.splitlines() if not line.startswith(" ")]
    assert "memsaver" not in "\n".join(said).replace("torch_memory_saver", "")


def test_named_in_sglang_plugins(run_sglang):
    seen, _ = run_sglang(SCENARIOS["data-parallel"], SGLANG_PLUGINS="another,memsaver")
    assert seen["saver"] == "MemsaverAdapter"


def test_an_invalid_flag(run_sglang):
    seen, log = run_sglang(SCENARIOS["scheduler"], status=1, MEMSAVER_SGLANG="perhaps")
    assert seen is None
    assert "MEMSAVER_SGLANG='perhaps' is not a flag" in log


def test_without_a_saver_nothing_happens(run_sglang):
    """If SGLang runs without `enable_memory_saver`, memsaver does not even open a driver."""
    _, log = run_sglang(
        """
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
engine.load_plugins()
saver = TorchMemorySaverAdapter.create(enable=False)
assert type(saver) is TorchMemorySaverAdapter and not saver.enabled
assert not {"torch", "numpy", "rich", "typer"} & set(sys.modules)
assert "libmemsaver_sim" not in open("/proc/self/maps").read()
        """
    )
    assert log == ""
    run_sglang(
        "engine.TorchMemorySaverAdapter.create(False)", MEMSAVER_DRIVER="/nonexistent/libcuda.so.1"
    )


@pytest.mark.each_python
@pytest.mark.parametrize("route", ["sglang.srt.plugins", "sglang.srt.platforms"])
def test_no_module_of_sglang_is_imported_for_the_hooks(run_python, route):
    """A detokenizer process loads the plugins too, but needs no scheduler modules."""
    run_python(
        f"""
import sys
import sglang.srt.plugins
if {route!r} == "sglang.srt.plugins":
    sglang.srt.plugins.load_plugins()
else:
    from sglang.srt.platforms import current_platform
assert not [name for name in sys.modules if name.startswith("sglang.srt.managers")]
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from memsaver.integrations.sglang import hooks
hooked = {{
    TokenizerControlMixin: ("release_memory_occupation", "resume_memory_occupation"),
    SchedulerWeightUpdaterManager: (
        "release_memory_occupation",
        "resume_memory_occupation",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
    ),
    WeightUpdater: ("update_weights_from_tensor", "update_weights_from_distributed"),
}}
for owner, names in hooked.items():
    for name in names:
        assert getattr(owner, name).__code__.co_filename == hooks.__file__, (owner, name)
assert not hasattr(WeightUpdater, "load_weights_from_distributed")  # which this version lacks
assert WeightUpdater().update_weights_from_tensor(named_tensors=7) == 7
        """,
        PYTHONPATH=os.pathsep.join([str(STAND_IN), IMPORT_PATH]),
        SGLANG_PLUGINS=None,
    )


def test_an_sglang_with_other_handlers(run_sglang):
    """The saver works without the hooks, and the log reports their absence."""
    _, log = run_sglang(
        """
import types
from memsaver.integrations.sglang import hooks, plugin
for name in hooks.modules():
    plugin._hook(types.ModuleType(name))
assert type(engine.TorchMemorySaverAdapter.create(enable=True)).__name__ == "MemsaverAdapter"
        """
    )
    assert log.count("memsaver cannot protect release and resume") == 4


def test_without_a_driver_the_saver_is_an_error(run_sglang):
    _, log = run_sglang(
        """
engine.load_plugins()
for _ in range(2):
    try:
        engine.TorchMemorySaverAdapter.create(enable=True)
    except Exception as error:
        assert "/nonexistent/libcuda.so.1" in str(error), error
        print(type(error).__name__, error, file=sys.stderr)
        """,
        MEMSAVER_DRIVER="/nonexistent/libcuda.so.1",
    )
    assert log.count("NotLoadedError") == 2 and log.count("MEMSAVER_SGLANG=0") == 2


@pytest.mark.each_python
@pytest.mark.parametrize("first", ["load_platform", "load_plugin"])
def test_entry_points_in_any_order_any_number_of_times(run_sglang, first):
    run_sglang(
        f"""
from memsaver.integrations.sglang import plugin
from sglang.srt.plugins.hook_registry import HookRegistry
calls = [plugin.load_platform, plugin.load_plugin]
calls = calls if {first!r} == "load_platform" else calls[::-1]
for call in calls * 2:
    assert call() is None
    HookRegistry.apply_hooks()
engine.load_plugins()
saver = engine.TorchMemorySaverAdapter.create(enable=True)
assert type(saver).__name__ == "MemsaverAdapter"
assert engine.TorchMemorySaverAdapter.create(enable=False).enabled is False
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import tokenizer_manager
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner_components import weight_updater
names = [kind.__name__ for kind in http_server.app.user_middleware]
assert names == ["CORSMiddleware", "AsleepAnswers"], names
left = [finder for finder in sys.meta_path if "memsaver.integrations" in type(finder).__module__]
assert not left, left
        """
    )


def test_an_sglang_without_the_method_for_the_guard_is_logged(run_sglang):
    _, log = run_sglang(SCENARIOS["scheduler"])
    assert "cannot protect a sleeping engine from requests" in log


def test_an_unexpected_server_is_logged(run_sglang):
    _, log = run_sglang(
        """
engine.load_plugins()
import sys, types
from importlib.machinery import ModuleSpec
from memsaver.integrations.sglang import plugin
plugin._hook_server(types.ModuleType("sglang.srt.entrypoints.http_server"))
        """
    )
    assert "cannot write a sleeping server's responses" in log


@pytest.mark.parametrize(
    "values, text",
    [
        ({"MEMSAVER_SGLANG_ASLEEP": "sleep"}, "must be one of refuse, wait, wake"),
        ({"MEMSAVER_SGLANG_ASLEEP_WAIT": "soon"}, "'soon' is not a number of seconds"),
        ({"MEMSAVER_SGLANG_ASLEEP_WAIT": "-1"}, "is not a number of seconds"),
        ({"MEMSAVER_SGLANG_ASLEEP_WAIT": "inf"}, "is not a number of seconds"),
        ({"MEMSAVER_SGLANG_SLEEP_AFTER": "10"}, "needs MEMSAVER_SGLANG_ASLEEP=wake"),
    ],
)
def test_invalid_policies_are_rejected(monkeypatch, values, text):
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text):
        settings.policy()


def test_the_policy_is_read_from_the_environment(monkeypatch):
    assert settings.policy() == Policy("refuse", 60.0, 0.0)
    monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP", " Wake ")
    monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP_WAIT", "2.5")
    monkeypatch.setenv("MEMSAVER_SGLANG_SLEEP_AFTER", "600")
    assert settings.policy() == Policy("wake", 2.5, 600.0)


def test_an_sglang_without_the_factory(run_sglang):
    _, log = run_sglang(
        """
import types
from memsaver.integrations.sglang import plugin
plugin._replace_factory(types.ModuleType("other"))
        """,
        STAND_IN_VERSION="0.9.0",
    )
    assert "memsaver is not active" in log and "0.9.0" in log


GRAPHS, REGISTER = "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "NCCL_GRAPH_REGISTER"


@pytest.mark.parametrize(
    "scenario, env, value, warned",
    [
        *((scenario, {GRAPHS: "1"}, "0", False) for scenario in SCENARIOS),
        *((scenario, {GRAPHS: "true", REGISTER: "1"}, "1", True) for scenario in SCENARIOS),
        ("actor", {GRAPHS: "0", REGISTER: "1"}, "1", False),
    ],
)
def test_nccl_registers_no_graph_memory(run_sglang, scenario, env, value, warned):
    seen, log = run_sglang(SCENARIOS[scenario], **env)
    assert seen["nccl"] == value
    assert ("unset it, or set it to 0" in log) is warned


@pytest.mark.parametrize("given, value", [(None, "1"), ("0", "0")])
def test_nccl_allocates_memory_that_it_can_release(run_sglang, given, value):
    env = {"MEMSAVER_SGLANG_SUSPEND_NCCL": "1", "NCCL_CUMEM_ENABLE": given}
    seen, _ = run_sglang(SCENARIOS["scheduler"], **env)
    assert seen["vmm"] == value


@pytest.mark.parametrize("value, warnings", [("1", 2), ("0", 0)])
def test_poison_is_warned_of_once_in_each_process(run_sglang, value, warnings):
    seen, log = run_sglang(SCENARIOS["scheduler"], MEMSAVER_POISON=value)
    assert log.count("option poison is on") == warnings
    cache_is_zero = [blocks[2] for blocks in seen["awake"]]
    assert all(cache_is_zero) is (warnings == 0)  # SGLang needs zeros


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version", ["0.5.12", "0.5.16", "0.5.23", "0.5.16.post1", "0.5.23+cu130", "v0.5.16"]
)
def test_tested_versions_cause_no_warning(version):
    assert versions.doubt(version) is None


@pytest.mark.parametrize("version", ["0.5.24", "0.6.0", "0.5.24.dev3", "0.0.0.dev0", "nonsense"])
def test_versions_it_was_not_tried_with(version):
    text = versions.doubt(version)
    assert f"not tested with SGLang {version}" in text and "MEMSAVER_SGLANG=0" in text


@pytest.mark.parametrize("version", ["0.4.9", "0.5.10", "0.5.10.post2"])
def test_versions_without_plugins_get_advice(version):
    assert "torch_memory_saver instead" in versions.doubt(version)


@pytest.mark.parametrize("version, warnings", [("0.5.23", 0), ("0.5.40", 2)])
def test_the_log_warns_once_in_each_process(run_sglang, version, warnings):
    _, log = run_sglang(SCENARIOS["scheduler"], STAND_IN_VERSION=version)
    assert log.count("was not tested with SGLang") == warnings


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.each_python
@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang.srt.platforms"])
def test_entry_points_are_declared(group):
    (entry,) = [entry for entry in entry_points(group=group) if entry.dist.name == "memsaver"]
    assert entry.name == "memsaver"
    assert callable(entry.load())


@pytest.mark.parametrize("value, on", [("", True), ("1", True), ("ON", True), ("no", False)])
def test_flags_are_parsed_or_rejected(monkeypatch, value, on):
    monkeypatch.setenv("MEMSAVER_SGLANG", value)
    assert settings.is_on() is on
    monkeypatch.setenv("MEMSAVER_SGLANG_PRELOAD", "maybe")
    with pytest.raises(ConfigError, match="MEMSAVER_SGLANG_PRELOAD"):
        settings.is_preloading()


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    """Write a module that can be imported, and return its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)

    def make(name: str, source: str = "value = 1\n") -> str:
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    yield make
    assert sys.meta_path == before, "a finder was left"
    for name in [path.stem for path in tmp_path.glob("*.py")]:
        sys.modules.pop(name, None)


@pytest.mark.each_python
def test_when_a_module_is_imported(make_module):
    name, seen = make_module("awaited_module"), []
    when_imported(name, lambda module: seen.append(module.value))
    when_imported(name, lambda module: seen.append("twice"))
    assert seen == [] and name not in sys.modules
    importlib.import_module("this")  # another module
    module = importlib.import_module(name)
    assert seen == [1]
    importlib.reload(module)
    assert seen == [1]
    # It is identical to a module that was imported without the finder.
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert module.__loader__ is module.__spec__.loader
    when_imported(name, lambda module: seen.append(2))
    assert seen == [1, 2]


@pytest.mark.each_python
def test_when_a_module_fails_at_first(make_module):
    name, seen = make_module("failing_module", "raise ImportError('not yet')\n"), []
    when_imported(name, seen.append)
    for _ in range(2):
        with pytest.raises(ImportError, match="not yet"):
            importlib.import_module(name)
    assert seen == []
    make_module("failing_module", "value = 1  # now it does\n")
    module = importlib.import_module(name)
    assert seen == [module]


@pytest.mark.each_python
def test_when_a_module_is_being_imported(make_module):
    """The module is ignored, because the end of its import cannot be observed."""
    when, seen = "memsaver.integrations.sglang.imports", []
    name = make_module(
        "half_module",
        f"""
from {when} import when_imported
import builtins
when_imported(__name__, builtins.half_module_seen.append)
        """,
    )
    sys.modules["builtins"].half_module_seen = seen
    try:
        module = importlib.import_module(name)
    finally:
        del sys.modules["builtins"].half_module_seen
    assert seen == []
    when_imported(name, seen.append)
    assert seen == [module]


def test_when_a_module_does_not_exist(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    when_imported("no_such_module_anywhere", pytest.fail)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")
