"""Fake SGLang modules that contain the fake classes."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager

from fake_sglang import messages
from fake_sglang.main_process import TokenizerManager
from fake_sglang.scheduler import (
    OlderScheduler,
    Scheduler,
    UnownedUpdater,
    Updater,
    UpdateWeightsMixin,
)

HANDLERS = {"0.5.23": Updater, "0.5.13": UnownedUpdater, "0.5.12": UpdateWeightsMixin}


@contextmanager
def modules(monkeypatch, version: str = "0.5.23"):
    """Install fake SGLang modules within the block; yield their classes, which can be changed.

    The locations of the handlers match the version of SGLang that `HANDLERS` names.
    """
    older = HANDLERS[version] is UpdateWeightsMixin
    classes = types.SimpleNamespace(
        Updater=type("SchedulerWeightUpdaterManager", (HANDLERS[version],), {}),
        Mixin=type("SchedulerUpdateWeightsMixin", (UpdateWeightsMixin,), {}),
        Scheduler=type("Scheduler", (Scheduler,), {}),
        Tokenizer=type("TokenizerControlMixin", (TokenizerManager,), {}),
    )
    if older:
        classes.Scheduler = type("Scheduler", (classes.Mixin, OlderScheduler), {})
    requests = {name: value for name, value in vars(messages).items() if "Req" in name}
    contents = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": requests,
        "sglang.srt.managers.scheduler": {"Scheduler": classes.Scheduler},
        "sglang.srt.managers.tokenizer_control_mixin": {"TokenizerControlMixin": classes.Tokenizer},
    }
    if older:
        contents["sglang.srt.managers.scheduler_update_weights_mixin"] = {
            "SchedulerUpdateWeightsMixin": classes.Mixin
        }
    else:
        contents["sglang.srt.managers.scheduler_components"] = {}
        contents["sglang.srt.managers.scheduler_components.weight_updater"] = {
            "SchedulerWeightUpdaterManager": classes.Updater
        }
    with monkeypatch.context() as patch:
        for name, values in contents.items():
            module = types.ModuleType(name)
            module.__path__ = []
            vars(module).update(values)
            patch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        yield classes
