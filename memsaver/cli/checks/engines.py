"""Checks of SGLang, vLLM and torch_memory_saver, and of memsaver's plugins for them. Imports none
of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memsaver.cli.checks.findings import Finding, absent, bad, good, warned
from memsaver.cli.checks.system import installed_version
from memsaver.errors import ConfigError

if TYPE_CHECKING:  # mypy knows the folder integrations/ as the package `integrations`
    from integrations.sglang import settings as sglang_settings
    from integrations.sglang import versions as sglang_versions
    from integrations.vllm import settings as vllm_settings
    from integrations.vllm import versions as vllm_versions
else:
    from memsaver.integrations.sglang import settings as sglang_settings
    from memsaver.integrations.sglang import versions as sglang_versions
    from memsaver.integrations.vllm import settings as vllm_settings
    from memsaver.integrations.vllm import versions as vllm_versions

__all__ = ["check_engines"]


def check_engines() -> list[Finding]:
    """Check the installed packages that use memsaver, and the packages that memsaver replaces."""
    return [*_sglang(), *_vllm(), _torch_memory_saver()]


def _sglang() -> list[Finding]:
    version = installed_version("sglang")
    if version is None:
        return [absent("SGLang", "not installed", version=None)]
    doubt = sglang_versions.doubt(version)
    data = {"version": version, "tried": doubt is None}
    if doubt is None:
        found = [good("SGLang", f"{version}: memsaver supports it", **data)]
    else:
        found = [warned("SGLang", version, doubt, **data)]
    return [*found, *_sglang_plugin()]


def _sglang_plugin() -> list[Finding]:
    """Check whether the environment lets SGLang load memsaver's plugin."""
    name = "SGLang plugin"
    try:
        on, preloading = sglang_settings.is_on(), sglang_settings.is_preloading()
        when_asleep = sglang_settings.policy().when_asleep
        sglang_settings.updates_are_checked(), sglang_settings.suspends_nccl()
        sglang_settings.backup(), sglang_settings.releases_unguarded()
    except ConfigError as error:
        return [bad(name, str(error), "correct it, or unset it")]
    listed = os.environ.get("SGLANG_PLUGINS")
    platform = os.environ.get("SGLANG_PLATFORM")
    if not on:
        return [warned(name, "turned off by MEMSAVER_SGLANG", "unset it to use memsaver")]
    if listed is not None and "memsaver" not in [part.strip() for part in listed.split(",")]:
        advice = "add memsaver to it, or unset it"
        return [warned(name, f"not in SGLANG_PLUGINS={listed}", advice)]
    if platform and platform != "memsaver":
        text = f"SGLANG_PLATFORM={platform} keeps SGLang from loading it"
        return [warned(name, text, "unset it to use memsaver")]
    mode = ", schedulers in preload mode" if preloading else ""
    text = f"on{mode}, for engines with enable_memory_saver{_requests(when_asleep)}"
    return [good(name, text)]


def _vllm() -> list[Finding]:
    version = installed_version("vllm")
    if version is None:
        return [absent("vLLM", "not installed", version=None, tried=False)]
    refusal = vllm_versions.refusal(version)
    data = {"version": version, "tried": refusal is None}
    if refusal is not None:
        return [warned("vLLM", version, refusal, **data)]
    return [good("vLLM", f"{version}: memsaver supports it", **data), _vllm_plugin()]


def _vllm_plugin() -> Finding:
    """Check whether the environment lets vLLM load memsaver's plugin."""
    name = "vLLM plugin"
    try:
        on, graphs_too = vllm_settings.is_on(), vllm_settings.graphs_are_pausable()
        when_asleep = vllm_settings.policy().when_asleep
        vllm_settings.backup()
    except ConfigError as error:
        return bad(name, str(error), "correct it, or unset it")
    if not on:
        return warned(name, "turned off by MEMSAVER_VLLM", "unset it to use memsaver")
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is not None and "memsaver" not in listed.split(","):  # vLLM does not strip blanks
        return warned(name, f"not in VLLM_PLUGINS={listed}", "add memsaver to it, or unset it")
    graphs = ", with CUDA graphs" if graphs_too else ""
    return good(name, f"on{graphs}, for engines with enable_sleep_mode{_requests(when_asleep)}")


def _requests(when_asleep: str) -> str:
    return "" if when_asleep == "refuse" else f"; requests to a sleeping engine: {when_asleep}"


def _torch_memory_saver() -> Finding:
    name, version = "torch_memory_saver", installed_version("torch-memory-saver")
    if version is None:
        advice = (
            "for programs that import it, pip install ./integrations/torch_memory_saver of "
            "memsaver's source tree"
        )
        return absent(name, "not installed", advice, version=None, is_memsaver=False)
    if "+memsaver" in version:
        return good(name, f"{version}: provided by memsaver", version=version, is_memsaver=True)
    advice = (
        "programs that import it (not SGLang from 0.5.11 on) do not use memsaver: "
        "integrations/torch_memory_saver in memsaver's source tree replaces it"
    )
    text = f"{version}: the original"
    return good(name, text, advice, version=version, is_memsaver=False)
