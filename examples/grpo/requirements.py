"""Check that the packages for a run are installed, before anything starts."""

from __future__ import annotations

import importlib.util
import os

from settings import Settings, SettingsError

GPU = "/dev/nvidiactl"


def check_installed(settings: Settings, *, picture: bool, started: bool = False) -> None:
    """Check that a run can start here and finish.

    Args:
        settings: the run's settings.
        picture: whether the run's results will be drawn.
        started: whether the run's engines are already running, in other processes.

    Raises:
        SettingsError: packages or a GPU are missing; the message explains how to install packages.
    """
    served = settings.engine == "sglang" and not started
    needed = ["transformers", *(["sglang"] if served else []), *(["matplotlib"] if picture else [])]
    missing = [name for name in needed if not is_installed(name)]
    if missing:
        advice = "; without a picture: --no-picture" if "matplotlib" in missing else ""
        advice += "; without SGLang: --engine model" if "sglang" in missing else ""
        raise SettingsError(
            f"not installed: {', '.join(missing)} (pip install {' '.join(missing)}{advice})"
        )
    if served and not os.path.exists(GPU):
        raise SettingsError("SGLang needs a GPU, and there is none here; without: --engine model")


def is_installed(name: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, such as None in sys.modules
        return False
