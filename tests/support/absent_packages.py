"""Fakes of packages with GPU kernels, so that SGLang's modules can be imported without them.

SGLang's modules use these packages in decorators and annotations at import time, but call their
kernels only on a GPU. A fake has an attribute for every name. Using the attribute as a decorator
changes nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

__all__ = ["install"]

PACKAGES = ("flashinfer", "sgl_kernel", "torchvision", "triton", "vllm")
_MISSING = ("driver",)  # without Triton's driver, SGLang concludes that there is no GPU


def _check(name: str) -> None:
    if name.startswith("__") or name in _MISSING:
        raise AttributeError(name)


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        _check(name)
        return Anything

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls


class Anything(metaclass=_Meta):
    """A fake class, function, decorator or constant."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        return super().__new__(cls)(*args, **named)

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __call__(self, *args: Any, **named: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not named
        return args[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        _check(name)
        return Anything

    def __getitem__(self, key: Any) -> Any:
        return self


class _Fake(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        _check(name)
        return Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Fake(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Install fakes of the packages that are not installed. Idempotent."""
    absent = frozenset(name for name in PACKAGES if importlib.util.find_spec(name) is None)
    if absent:
        # torch chooses its own code by what it can import, so it must look before the fakes exist.
        import torch._inductor.codegen.triton
        import torch._inductor.runtime.triton_heuristics  # noqa: F401

        sys.meta_path.append(_Finder(absent))
