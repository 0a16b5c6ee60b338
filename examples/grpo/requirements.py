"""Check, before a run starts, that its required packages are installed."""

from __future__ import annotations

import importlib.util
import os

from settings import Settings, SettingsError

GPU = "/dev/nvidiactl"
ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}


def check_installed(settings: Settings, *, picture: bool, started: bool = False) -> None:
    """Check that a run can start on this machine and finish.

    Args:
        settings: the run's settings.
        picture: whether the run's results will be plotted.
        started: whether the run's engines are already running, in other processes.

    Raises:
        SettingsError: packages or a GPU are missing; the message explains how to install packages.
    """
    name = ENGINES.get(settings.engine, "")
    served = bool(name) and not started
    package = [settings.engine] if served else []
    needed = ["transformers", *package, *(["matplotlib"] if picture else [])]
    missing = [one for one in needed if not is_installed(one)]
    if missing:
        advice = "; without a picture: --no-picture" if "matplotlib" in missing else ""
        advice += f"; without {name}: --engine model" if settings.engine in missing else ""
        raise SettingsError(
            f"not installed: {', '.join(missing)} (pip install {' '.join(missing)}{advice})"
        )
    if served and not os.path.exists(GPU):
        raise SettingsError(f"{name} needs a GPU, and there is none here; without: --engine model")


def is_installed(name: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, such as None in sys.modules
        return False
