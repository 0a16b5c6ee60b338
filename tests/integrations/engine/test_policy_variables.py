"""Tests the launch arguments that define an engine's policy for requests."""

from __future__ import annotations

import pytest

from memsaver.errors import ConfigError
from memsaver.integrations.engine.variables import EnginePolicies


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"asleep": "sleep"}, "asleep='sleep' must be one of refuse, wait, wake"),
        ({"asleep": ""}, "asleep='' must be one of"),
        ({"asleep": True}, "asleep=True must be one of"),
        ({"asleep": ["wake"]}, "must be one of"),
        ({"asleep_wait": "soon"}, "asleep_wait='soon' is not a number of seconds"),
        ({"asleep_wait": "5"}, "is not a number of seconds"),
        ({"asleep_wait": -1}, "asleep_wait=-1 is not a number of seconds"),
        ({"asleep": "wake", "sleep_after": float("nan")}, "sleep_after=nan is not a number"),
        ({"asleep": "wake", "sleep_after": True}, "sleep_after=True is not a number"),
        ({"asleep": "wake", "sleep_after": 1e6}, "between 0 and one day"),
        ({"asleep_requests": 0}, "asleep_requests=0 is not a positive whole number"),
        ({"asleep_requests": 2.0}, "is not a positive whole number"),
        ({"sleep_after": 10}, "sleep_after needs MEMSAVER_SGLANG_ASLEEP=wake"),
        ({"asleep": "wait", "sleep_after": 10}, "sleep_after needs asleep=wake"),
    ],
)
def test_invalid_policies_of_a_launch_are_rejected(arguments, text):
    with pytest.raises(ConfigError, match=text):
        EnginePolicies("MEMSAVER_SGLANG").variables(arguments)


def test_an_engine_without_the_plugin_has_no_policy(monkeypatch):
    monkeypatch.setenv("MEMSAVER_VLLM", "0")
    policies = EnginePolicies("MEMSAVER_VLLM")
    with pytest.raises(
        ConfigError, match="asleep, sleep_after cannot take effect, because MEMSAVER_VLLM turns"
    ):
        policies.variables({"asleep": "wake", "asleep_wait": None, "sleep_after": 5})
    assert policies.variables({"asleep": None}) == {}


def test_an_argument_overrides_its_variable(monkeypatch):
    monkeypatch.setenv("MEMSAVER_VLLM_ASLEEP", "wake")
    monkeypatch.setenv("MEMSAVER_VLLM_SLEEP_AFTER", "30")
    given = {"asleep": None, "asleep_wait": 0, "sleep_after": 2.5}
    expected = {"MEMSAVER_VLLM_ASLEEP_WAIT": "0", "MEMSAVER_VLLM_SLEEP_AFTER": "2.5"}
    assert EnginePolicies("MEMSAVER_VLLM").variables(given) == expected
    with pytest.raises(ConfigError, match="MEMSAVER_VLLM_SLEEP_AFTER needs asleep=wake"):
        EnginePolicies("MEMSAVER_VLLM").variables({"asleep": "refuse"})
    assert EnginePolicies("MEMSAVER_VLLM").variables({"asleep": "refuse", "sleep_after": 0})
