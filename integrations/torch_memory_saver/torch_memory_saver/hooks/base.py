"""The hook modes, and the base class of their helper objects."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from memsaver.errors import ConfigError
from torch_memory_saver.utils import preload_library

__all__ = ["HookMode", "HookUtilBase", "HookUtilModePreload"]

HookMode: TypeAlias = Literal["preload", "torch"]


class HookUtilBase:
    """The base class of objects that describe a hook mode to other programs.

    memsaver itself does not call such objects, so replacing their methods has no effect on it.
    """

    @staticmethod
    def create(hook_mode: HookMode) -> HookUtilBase:
        """Return the object for a mode.

        Raises:
            ConfigError: the mode is not "preload". For the mode "torch", memsaver has no separate
                library, and no allocator that other programs can use.
        """
        if hook_mode != "preload":
            raise ConfigError(
                f"memsaver has no HookUtilBase for hook_mode {hook_mode!r}: to choose the mode, "
                "set torch_memory_saver.hook_mode"
            )
        return HookUtilModePreload()

    def get_path_binary(self) -> str | None:
        """Return the path of the mode's library. Subclasses implement this method."""
        raise NotImplementedError

    def get_allocator(self) -> Any:
        """Return the mode's allocator for `torch.cuda.MemPool`; None if the mode has none."""
        return None


class HookUtilModePreload(HookUtilBase):
    """Describes the mode "preload" to other programs."""

    def get_path_binary(self) -> str | None:
        """Return the path of the library for `LD_PRELOAD`, even if it is not preloaded.

        Raises:
            NotLoadedError: the library is missing.
            ConfigError: the path contains a space or a colon, which `LD_PRELOAD` does not support.
        """
        return str(preload_library())
