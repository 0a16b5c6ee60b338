"""The hook modes."""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["HookMode"]

HookMode: TypeAlias = Literal["preload", "torch"]
