"""What a run needs to be installed, which is checked before anything starts."""

from __future__ import annotations

import importlib.util
import os

from settings import Settings, SettingsError

GPU = "/dev/nvidiactl"


def check_installed(settings: Settings, *, picture: bool, started: bool = False) -> None:
    """Check that a run can start here and finish.

    Args:
        settings: of the run.
        picture: whether its results are drawn.
        started: whether its engines run already, in processes of their own.

    Raises:
        SettingsError: packages are missing, or a GPU; the message says how to get them.
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
    """Whether a package can be imported; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, such as None in sys.modules
        return False
