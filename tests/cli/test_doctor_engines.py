"""Tests `memsaver doctor`'s findings about SGLang, vLLM and torch_memory_saver."""

import pytest
from doctors import of

from memsaver.cli.checks import engines

VERSIONS = [
    ("SGLang", "0.5.16", True),
    ("SGLang", "0.5.24", False),
    ("SGLang", "0.5.2", False),
    ("vLLM", "0.26.0", True),
    ("vLLM", "0.33.1", True),
    ("vLLM", "0.7.3", False),
]
SETTINGS = [
    ("SGLang", {}, "good", "on, for engines with enable_memory_saver"),
    ("SGLang", {"MEMSAVER_SGLANG": "0"}, "warned", "turned off"),
    ("SGLang", {"MEMSAVER_SGLANG": "maybe"}, "bad", "maybe"),
    ("SGLang", {"SGLANG_PLUGINS": "other"}, "warned", "SGLANG_PLUGINS=other"),
    ("SGLang", {"SGLANG_PLUGINS": "other, memsaver"}, "good", "on"),
    ("SGLang", {"SGLANG_PLATFORM": "other"}, "warned", "SGLANG_PLATFORM=other"),
    ("SGLang", {"SGLANG_PLATFORM": "memsaver"}, "good", "on"),
    ("SGLang", {"MEMSAVER_SGLANG_PRELOAD": "1"}, "good", "preload mode"),
    ("SGLang", {"MEMSAVER_SGLANG_SLEEP_AFTER": "9"}, "bad", "needs MEMSAVER_SGLANG_ASLEEP=wake"),
    ("SGLang", {"MEMSAVER_SGLANG_SUSPEND_NCCL": "x"}, "bad", "MEMSAVER_SGLANG_SUSPEND_NCCL"),
    ("SGLang", {"MEMSAVER_SGLANG_CHECK_UPDATES": "x"}, "bad", "MEMSAVER_SGLANG_CHECK_UPDATES"),
    ("SGLang", {"MEMSAVER_SGLANG_UNGUARDED": "x"}, "bad", "MEMSAVER_SGLANG_UNGUARDED"),
    ("SGLang", {"MEMSAVER_SGLANG_BACKUP": "none"}, "bad", "MEMSAVER_SGLANG_BACKUP"),
    ("vLLM", {"MEMSAVER_VLLM_BACKUP": "x"}, "bad", "MEMSAVER_VLLM_BACKUP"),
    ("vLLM", {}, "good", "on, for engines with enable_sleep_mode"),
    ("vLLM", {"MEMSAVER_VLLM": "0"}, "warned", "turned off"),
    ("vLLM", {"MEMSAVER_VLLM": "maybe"}, "bad", "maybe"),
    ("vLLM", {"VLLM_PLUGINS": "other"}, "warned", "VLLM_PLUGINS=other"),
    ("vLLM", {"VLLM_PLUGINS": ""}, "warned", "VLLM_PLUGINS="),
    ("vLLM", {"VLLM_PLUGINS": "other, memsaver"}, "warned", "VLLM_PLUGINS=other, memsaver"),
    ("vLLM", {"VLLM_PLUGINS": "other,memsaver"}, "good", "on"),
    ("vLLM", {"MEMSAVER_VLLM_GRAPHS": "1"}, "good", "with CUDA graphs"),
]
for engine in ("SGLang", "vLLM"):
    prefix = f"MEMSAVER_{engine.upper()}"
    SETTINGS += [
        (engine, {f"{prefix}_ASLEEP": "wait"}, "good", "requests to a sleeping engine: wait"),
        (engine, {f"{prefix}_ASLEEP": "sleep"}, "bad", "must be one of refuse, wait, wake"),
    ]


def install(plain, engine, version):
    """Make one engine the only engine that is installed."""
    plain.setattr(
        engines, "installed_version", lambda name: version if name == engine.lower() else None
    )


@pytest.mark.parametrize(("engine", "version", "tried"), VERSIONS)
def test_versions_of_engines(plain, engine, version, tried):
    install(plain, engine, version)
    found = {finding.name: finding for finding in engines.check_engines()}
    assert found[engine].level == ("good" if tried else "warned")
    assert found[engine].data["tried"] is tried
    # SGLang loads the plugin in each version; with other versions of vLLM, it does nothing.
    assert (f"{engine} plugin" in found) is (tried or engine == "SGLang")
    other = found["vLLM" if engine == "SGLang" else "SGLang"]
    assert (other.level, other.text) == ("absent", "not installed")


@pytest.mark.parametrize(("engine", "env", "level", "says"), SETTINGS)
def test_settings_decide_whether_an_engine_loads_the_plugin(plain, engine, env, level, says):
    for name, value in env.items():
        plain.setenv(name, value)
    install(plain, engine, {"SGLang": "0.5.16", "vLLM": "0.26.0"}[engine])
    found = of(engines.check_engines(), f"{engine} plugin")
    assert found.level == level and says in found.text


@pytest.mark.parametrize(
    ("version", "says"),
    [("0.0.10+memsaver", "provided by memsaver"), ("0.0.10", "the original")],
)
def test_the_provider_of_torch_memory_saver(plain, version, says):
    plain.setattr(engines, "installed_version", lambda name: version)
    found = of(engines.check_engines(), "torch_memory_saver")
    assert says in found.text and found.data["is_memsaver"] == ("memsaver" in version)
