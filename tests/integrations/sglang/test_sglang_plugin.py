"""Tests the SGLang plugin and the memory saver that it installs in every process of SGLang.

tests/fixtures/sglang_plugins is a fake SGLang. The fake's processes find the plugin through the
entry points of the installed memsaver.
"""

import json
import os
from importlib.metadata import entry_points

import pytest
from repository import IMPORT_PATH, TESTS

from memsaver import ConfigError
from memsaver.integrations.engine.policies import Policy
from memsaver.integrations.sglang import settings, versions

IMPORTS = os.pathsep.join([str(TESTS / "fixtures" / "sglang_plugins"), IMPORT_PATH])


# --- the package ----------------------------------------------------------------------------------


@pytest.mark.each_python
def test_the_controller_is_imported_on_first_use(run_python):
    """Until memsaver is first used, SGLang's processes load only the plugin."""
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


# --- every process --------------------------------------------------------------------------------

SCENARIOS = {
    "scheduler": "engine.launch(PATH)",
    "data-parallel": "engine.launch(PATH, data_parallel=True)",
    "actor": "engine.launch_actor(PATH)",
}


UNSET_VARIABLES = (
    "SGLANG_PLUGINS",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
    "NCCL_GRAPH_REGISTER",
    "NCCL_CUMEM_ENABLE",
    "NCCL_MAX_CTAS",
)


@pytest.fixture
def run_sglang(run_python, tmp_path):
    """Run lines in a process with `engine`; return the scheduler's results and stderr."""
    path = tmp_path / "seen.json"

    def run(lines: str, status: int = 0, **env):
        code = f"PATH = {str(path)!r}\nimport sys\nfrom sglang.srt import engine\n{lines}\n"
        env = {"PYTHONPATH": IMPORTS, **dict.fromkeys(UNSET_VARIABLES), **env}
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
        "ctas": None,
        "nccl": None,
        "torch": False,
    }
    assert "Traceback" not in log
    # One line for each process with a saver, however many savers it creates.
    lines = [line for line in log.splitlines() if "is SGLang's memory saver in process" in line]
    assert len(lines) == len(set(lines)) == (1 if scenario == "actor" else 2)


@pytest.mark.parametrize(
    ("scenario", "env"),
    [
        ("scheduler", {"MEMSAVER_SGLANG": "0"}),
        ("data-parallel", {"MEMSAVER_SGLANG": "off"}),
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


@pytest.mark.parametrize(
    "name",
    [
        "MEMSAVER_SGLANG",
        "MEMSAVER_SGLANG_CHECK_UPDATES",
        "MEMSAVER_SGLANG_SUSPEND_NCCL",
        "MEMSAVER_SGLANG_UNGUARDED",
    ],
)
def test_an_invalid_flag(run_sglang, name):
    seen, log = run_sglang(SCENARIOS["scheduler"], status=1, **{name: "perhaps"})
    assert seen is None
    assert f"{name}='perhaps' is not a flag" in log
    assert "is SGLang's memory saver" not in log  # or the first release would end the scheduler


def test_an_invalid_place_of_backups(run_sglang):
    seen, log = run_sglang(SCENARIOS["scheduler"], status=1, MEMSAVER_SGLANG_BACKUP="none")
    assert seen is None
    assert "MEMSAVER_SGLANG_BACKUP='none' is not a place for backups" in log


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
    """A detokenizer process also loads the plugins but needs no scheduler modules."""
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
from memsaver.integrations.engine import hooking
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
        assert getattr(owner, name).__code__.co_filename == hooking.__file__, (owner, name)
assert not hasattr(WeightUpdater, "load_weights_from_distributed")  # which this version lacks
assert WeightUpdater().update_weights_from_tensor(named_tensors=7) == 7
        """,
        PYTHONPATH=IMPORTS,
        SGLANG_PLUGINS=None,
    )


# Lines that replace a module of SGLang, by the message that they cause.
OTHER_INTERFACES = {
    "cannot protect release and resume": """
for name in hooks.modules():
    plugin._hook(types.ModuleType(name))
""",
    "cannot protect a sleeping engine from requests": """
module = types.ModuleType("sglang.srt.managers.scheduler")
module.Scheduler = type("Scheduler", (), {"get_internal_state": lambda *_: None})
hooks.install_in(module)
""",
    "cannot write a sleeping server's responses": """
plugin._hook_server(types.ModuleType("sglang.srt.entrypoints.http_server"))
""",
    "TorchMemorySaverAdapter.create. memsaver was not tested with SGLang 0.9.0": """
plugin._replace_factory(types.ModuleType("other"))
""",
}


@pytest.mark.parametrize("message", OTHER_INTERFACES)
def test_an_sglang_with_another_interface_is_logged_and_the_saver_works(run_sglang, message):
    _, log = run_sglang(
        f"""
import types
from memsaver.integrations.sglang import hooks, plugin
engine.load_plugins()
{OTHER_INTERFACES[message]}
assert type(engine.TorchMemorySaverAdapter.create(enable=True)).__name__ == "MemsaverAdapter"
        """,
        STAND_IN_VERSION="0.9.0",
    )
    assert log.count(message) == (4 if "release and resume" in message else 1)


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
from sglang.srt.managers import communicator, tokenizer_manager
from sglang.srt.mem_cache import swa_memory_pool
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner_components import weight_updater
names = [kind.__name__ for kind in http_server.app.user_middleware]
assert names == ["CORSMiddleware", "AsleepAnswers"], names
left = [finder for finder in sys.meta_path if "memsaver.integrations" in type(finder).__module__]
assert not left, left
        """
    )


@pytest.mark.parametrize(
    "values, text",
    [
        ({"MEMSAVER_SGLANG_ASLEEP": "sleep"}, "must be one of refuse, wait, wake"),
        ({"MEMSAVER_SGLANG_ASLEEP_WAIT": "soon"}, "'soon' is not a number of seconds"),
        ({"MEMSAVER_SGLANG_ASLEEP_WAIT": "-1"}, "is not a number of seconds"),
        ({"MEMSAVER_SGLANG_ASLEEP_WAIT": "inf"}, "is not a number of seconds"),
        ({"MEMSAVER_SGLANG_ASLEEP_REQUESTS": "0"}, "'0' is not a positive whole number"),
        ({"MEMSAVER_SGLANG_ASLEEP_REQUESTS": "1e3"}, "is not a positive whole number"),
        ({"MEMSAVER_SGLANG_SLEEP_AFTER": "10"}, "needs MEMSAVER_SGLANG_ASLEEP=wake"),
    ],
)
def test_invalid_policies_are_rejected(monkeypatch, values, text):
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text):
        settings.policy()


def test_the_policy_is_read_from_the_environment(monkeypatch):
    assert settings.policy() == Policy("refuse", 60.0, 0.0, 65536)
    monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP", " Wake ")
    monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP_WAIT", "2.5")
    monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP_REQUESTS", "8")
    monkeypatch.setenv("MEMSAVER_SGLANG_SLEEP_AFTER", "600")
    assert settings.policy() == Policy("wake", 2.5, 600.0, 8)


GRAPHS, REGISTER = "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "NCCL_GRAPH_REGISTER"
UNSET = "unset it, or set it to 0"


@pytest.mark.parametrize(
    "scenario, env, values, warning",
    [
        pytest.param(
            "data-parallel",
            {"MEMSAVER_SGLANG_PRELOAD": "1"},
            {"preloaded": True, "awake": [[True] * 3] * 4},
            "preload mode",
            marks=pytest.mark.preloads,
        ),
        # NCCL registers no memory of graphs.
        ("scheduler", {GRAPHS: "1"}, {"nccl": "0"}, ""),
        ("actor", {GRAPHS: "1"}, {"nccl": "0"}, ""),
        (
            "data-parallel",
            {"SGLANG_PLUGINS": "another,memsaver", GRAPHS: "true", REGISTER: "1"},
            {"saver": "MemsaverAdapter", "nccl": "1"},
            UNSET,
        ),
        ("actor", {GRAPHS: "0", REGISTER: "1"}, {"nccl": "1"}, ""),
    ],
)
def test_variables_reach_every_process(run_sglang, scenario, env, values, warning):
    seen, log = run_sglang(SCENARIOS[scenario], **env)
    assert {name: seen[name] for name in values} == values
    assert warning in log and (UNSET in log) == (warning == UNSET)


@pytest.mark.parametrize(
    "vmm, ctas, used, poison, version, warnings",
    [(None, None, ["1", "12"], "1", "0.5.40", 2), ("0", "4", ["0", "4"], "0", "0.5.23", 0)],
)
def test_settings_of_every_process(run_sglang, vmm, ctas, used, poison, version, warnings):
    """Each process warns once. NCCL's memory can be released unless the user has disabled its
    release."""
    env = {"MEMSAVER_SGLANG_SUSPEND_NCCL": "1", "NCCL_CUMEM_ENABLE": vmm, "NCCL_MAX_CTAS": ctas}
    env |= {"MEMSAVER_POISON": poison, "STAND_IN_VERSION": version}
    seen, log = run_sglang(SCENARIOS["scheduler"], **env)
    assert [seen["vmm"], seen["ctas"]] == used
    assert log.count("option poison is on") == warnings
    cache_is_zero = [blocks[2] for blocks in seen["awake"]]
    assert all(cache_is_zero) is (poison == "0")  # SGLang needs zeros
    assert log.count("was not tested with SGLang") == warnings


# --- versions -------------------------------------------------------------------------------------


UNTESTED = ("0.5.24", "0.6.0", "0.5.24.dev3", "0.0.0.dev0", "nonsense")
WARNINGS = {
    **dict.fromkeys(("0.5.12", "0.5.16", "0.5.23", "0.5.16.post1", "0.5.23+cu130", "v0.5.16"), ()),
    **{one: (f"not tested with SGLang {one}", "MEMSAVER_SGLANG=0") for one in UNTESTED},
    **dict.fromkeys(("0.4.9", "0.5.10", "0.5.10.post2"), ("torch_memory_saver instead",)),
}


@pytest.mark.parametrize(("version", "words"), WARNINGS.items(), ids=WARNINGS)
def test_versions_that_were_not_tested_cause_a_warning(version, words):
    doubt = versions.doubt(version)
    assert (doubt is None) == (not words) and all(word in doubt for word in words)


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
