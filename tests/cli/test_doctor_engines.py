"""Test `memsaver doctor`'s findings about SGLang, vLLM and torch_memory_saver."""

import pytest
from doctors import of

from memsaver.cli.checks import engines


@pytest.mark.parametrize(
    ("version", "level", "tried"),
    [("0.5.16", "good", True), ("0.5.24", "warned", False), ("0.5.2", "warned", False)],
)
def test_versions_of_sglang(plain, version, level, tried):
    plain.setattr(engines, "installed_version", lambda name: version if name == "sglang" else None)
    found = engines.check_engines()
    assert of(found, "SGLang").level == level and of(found, "SGLang").data["tried"] is tried
    assert of(found, "SGLang plugin").level == "good"
    assert (of(found, "vLLM").level, of(found, "vLLM").text) == ("absent", "not installed")


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        ({"MEMSAVER_SGLANG": "0"}, "warned", "turned off"),
        ({"MEMSAVER_SGLANG": "maybe"}, "bad", "maybe"),
        ({"SGLANG_PLUGINS": "other"}, "warned", "SGLANG_PLUGINS=other"),
        ({"SGLANG_PLUGINS": "other, memsaver"}, "good", "on"),
        ({"SGLANG_PLATFORM": "other"}, "warned", "SGLANG_PLATFORM=other"),
        ({"MEMSAVER_SGLANG_PRELOAD": "1"}, "good", "preload mode"),
        ({"MEMSAVER_SGLANG_ASLEEP": "wait"}, "good", "requests to a sleeping engine: wait"),
        ({"MEMSAVER_SGLANG_ASLEEP": "sleep"}, "bad", "must be one of refuse, wait, wake"),
        ({"MEMSAVER_SGLANG_SLEEP_AFTER": "9"}, "bad", "needs MEMSAVER_SGLANG_ASLEEP=wake"),
        ({"MEMSAVER_SGLANG_SUSPEND_NCCL": "x"}, "bad", "MEMSAVER_SGLANG_SUSPEND_NCCL"),
        ({"MEMSAVER_SGLANG_CHECK_UPDATES": "x"}, "bad", "MEMSAVER_SGLANG_CHECK_UPDATES"),
    ],
)
def test_sglangs_settings_decide_whether_it_loads_the_plugin(plain, env, level, says):
    check_plugin(plain, "SGLang", "0.5.16", env, level, says)


def check_plugin(plain, engine, version, env, level, says):
    for name, value in env.items():
        plain.setenv(name, value)
    plain.setattr(engines, "installed_version", lambda name: version)
    found = of(engines.check_engines(), f"{engine} plugin")
    assert found.level == level and says in found.text


@pytest.mark.parametrize(
    ("version", "level", "tried"),
    [("0.26.0", "good", True), ("0.33.1", "good", True), ("0.7.3", "warned", False)],
)
def test_versions_of_vllm(plain, version, level, tried):
    plain.setattr(engines, "installed_version", lambda name: version if name == "vllm" else None)
    found = engines.check_engines()
    assert of(found, "vLLM").level == level and of(found, "vLLM").data["tried"] is tried
    assert ("vLLM plugin" in [finding.name for finding in found]) is tried
    assert (of(found, "SGLang").level, of(found, "SGLang").text) == ("absent", "not installed")


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        ({}, "good", "on, for engines with enable_sleep_mode"),
        ({"MEMSAVER_VLLM": "0"}, "warned", "turned off"),
        ({"MEMSAVER_VLLM": "maybe"}, "bad", "maybe"),
        ({"VLLM_PLUGINS": "other"}, "warned", "VLLM_PLUGINS=other"),
        ({"VLLM_PLUGINS": ""}, "warned", "VLLM_PLUGINS="),
        ({"VLLM_PLUGINS": "other, memsaver"}, "warned", "VLLM_PLUGINS=other, memsaver"),
        ({"VLLM_PLUGINS": "other,memsaver"}, "good", "on"),
        ({"MEMSAVER_VLLM_GRAPHS": "1"}, "good", "with CUDA graphs"),
        ({"MEMSAVER_VLLM_ASLEEP": "wake"}, "good", "requests to a sleeping engine: wake"),
        ({"MEMSAVER_VLLM_ASLEEP": "sleep"}, "bad", "must be one of refuse, wait, wake"),
        ({"MEMSAVER_VLLM_CHECK_UPDATES": "x"}, "bad", "MEMSAVER_VLLM_CHECK_UPDATES"),
    ],
)
def test_vllms_settings_decide_whether_it_loads_the_plugin(plain, env, level, says):
    check_plugin(plain, "vLLM", "0.26.0", env, level, says)


@pytest.mark.parametrize(
    ("version", "says"),
    [("0.0.10+memsaver", "provided by memsaver"), ("0.0.10", "the original")],
)
def test_the_provider_of_torch_memory_saver(plain, version, says):
    plain.setattr(engines, "installed_version", lambda name: version)
    found = of(engines.check_engines(), "torch_memory_saver")
    assert says in found.text and found.data["is_memsaver"] == ("memsaver" in version)
