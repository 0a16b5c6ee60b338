"""`PlainCheck`: checks of a weight load without a verification request.

An engine's loader skips names that the model does not use, and may load only a part of a tensor
that is too large. Detecting such tensors takes time, because each of the loader's operations is
observed. Each name and shape is therefore checked only once; later loads look up the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..fields import Fields
from ..messages import Failure
from .model_loader import replaced_loader
from .writes import Load, Named, Operation, Source, Writes

__all__ = ["Found", "Known", "PlainCheck", "verdict"]

Known = set[tuple[str, tuple[int, ...]]]
"""Names and shapes in earlier loads that succeeded on all ranks."""

# Tensors of checkpoints that loaders skip, because the model computes them.
_COMPUTED = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.attn\.(masked_)?bias$|position_ids$"
)
# Layers for multi-token prediction, such as model.mtp_layers.0, which only draft models load.
_PREDICTION = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SHOWN = 8  # names in a message


@dataclass(frozen=True)
class Part:
    """The part of a tensor that a rank copied to its model.

    Attributes:
        copied: the number of bytes in this part.
        whole: the number of bytes in the whole tensor.
        digest: a digest of the part's position; equal parts have equal digests.
    """

    copied: int
    whole: int
    digest: str


@dataclass(frozen=True)
class Found:
    """The result of a load on one rank.

    Attributes:
        rank: the rank in its tensor-parallel group.
        success: whether the engine reports success; False if the load raised an exception.
        message: the engine's message.
        failure: the exception that the load raised, or None.
        unused: the tensors from which nothing was written to the model, with their numbers of
            elements.
        partial: the written part of each tensor that was only partly written.
    """

    rank: int
    success: bool = False
    message: str = ""
    failure: Failure | None = None
    unused: Mapping[str, int] = field(default_factory=dict)
    partial: Mapping[str, Part] = field(default_factory=dict)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Found:
        """Read a result from the output of `asdict`.

        Raises `EngineError` if the fields are invalid.
        """
        read = Fields(fields, "a rank's load")
        partial = {}
        for name, value in (read.optional("partial") or {}).items():
            part = Fields(value, "a part of a tensor")
            partial[name] = Part(part.whole("copied"), part.whole("whole"), part.text("digest"))
        return cls(
            read.whole("rank"),
            read.flag("success"),
            read.text("message", ""),
            Failure.from_fields(read.optional("failure")),
            read.wholes("unused"),
            partial,
        )


class PlainCheck:
    """The checks of one load on this rank.

    Attributes:
        unused, partial: see `Found`.

    Args:
        known: the names and shapes of earlier loads (see `Known`), which the check does not change.
        watches: whether to detect unused and partial tensors.
    """

    def __init__(self, known: Known, *, watches: bool = True) -> None:
        self.unused: dict[str, int] = {}
        self.partial: dict[str, Part] = {}
        self._known = known
        self._watches = watches
        self._seen: Known = set()
        self._used: set[str] = set()  # loaded by at least one model runner

    @property
    def seen(self) -> Known:
        """The names and shapes that later loads need not check.

        An unused name is omitted if the source of a write was unknown.
        """
        return self._seen

    def around_loader(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Make the model's loader run the checks during the block."""
        if not self._watches:
            return replaced_loader(model, lambda given, load: load(given))
        return replaced_loader(model, lambda given, load: self._checked(model, list(given), load))

    def _checked(self, model: Any, given: Named, load: Load) -> Any:
        if {(name, tuple(tensor.shape)) for name, tensor in given} <= self._known:
            return load(given)
        return self._watched(model, given, load)

    def _watched(self, model: Any, given: Named, load: Load) -> Any:
        coverage = _Coverage(model, Source(given))
        result = coverage.run(load)
        source = coverage.source
        self._used |= source.used
        for name, tensor in given:
            count = int(tensor.numel())
            is_unused = count > 0 and name not in self._used and not _is_skipped(model, name)
            if not (is_unused and source.blurred):
                self._seen.add((name, tuple(tensor.shape)))
            if not count or source.blurred:
                continue
            if is_unused:
                self.unused[name] = count
            elif name in source.used and coverage.is_copied(name):
                part = coverage.part(name, int(tensor.nbytes))
                if part.copied < part.whole:
                    self.partial[name] = part
        for name in self._used:
            self.unused.pop(name, None)
        return result


class _Coverage(Writes):
    """Records which parts of each tensor are copied."""

    def __init__(self, model: Any, source: Source) -> None:
        super().__init__(model, source)
        self._converted: set[str] = set()
        # By name: the copied views, each with its offset in bytes, element size, strides and sizes.
        # A set, because a loader may copy a view several times.
        self._views: dict[str, set[tuple[int, int, tuple[int, ...], tuple[int, ...]]]] = {}
        self._begins = {name: tensor.data_ptr() for name, tensor in source.named}

    def write(self, operation: Operation, written: list[Any], names: list[str]) -> Any:
        """See `Writes`."""
        view = operation.args[1] if operation.is_copy else None
        if len(names) == 1 and view is not None and self.source.views(view) == names:
            offset = view.data_ptr() - self._begins[names[0]]
            place = (offset, view.element_size(), tuple(view.stride()), tuple(view.size()))
            self._views.setdefault(names[0], set()).add(place)
        elif operation.constant != 0:
            self._converted.update(names)
        return operation.run()

    def is_copied(self, name: str) -> bool:
        """Return whether every write from this tensor, except padding, copied a view of it."""
        return name in self._views and name not in self._converted

    def part(self, name: str, whole: int) -> Part:
        """Return the copied part of a tensor of `whole` bytes.

        Different views that overlap are each counted in full.
        """
        views = sorted(self._views[name])
        copied = sum(size * math.prod(sizes) for _, size, _, sizes in views)
        return Part(copied, whole, hashlib.sha256(repr(views).encode()).hexdigest()[:16])


def _is_skipped(model: Any, name: str) -> bool:
    """Return whether a model's loader is known to skip a tensor of this name."""
    if _COMPUTED.search(name) or _PREDICTION.search(name):
        return True
    for tensors in (model.named_parameters, model.named_buffers):
        if any(known == name for known, _ in tensors(remove_duplicate=False)):
            return True  # tied to another tensor
    config = getattr(model, "config", None)
    layer = _LAYER.search(name)
    for one in (config, getattr(config, "text_config", None)):  # also of a multimodal model
        if name.endswith("lm_head.weight") and getattr(one, "tie_word_embeddings", False):
            return True
        layers = getattr(one, "num_hidden_layers", None)
        predicts = getattr(one, "num_nextn_predict_layers", 0)  # loaded by a draft model
        if layer and predicts and isinstance(layers, int) and int(layer[1]) >= layers:
            return True
    return False


def verdict(ranks: Sequence[Found]) -> str:
    """Return the reason why a load counts as failed; "" if the load succeeded on all ranks."""
    count = len(ranks)
    for found in ranks:
        if found.failure is not None:
            return (
                f"the update failed on rank {found.rank} of {count}: {found.failure.kind}: "
                f"{found.failure.message}; some of its tensors may have been loaded: send all "
                "weights again"
            )
    for found in ranks:
        if not found.success:
            return found.message
    unknown = set.intersection(*(set(found.unused) for found in ranks))
    if unknown:
        return (
            f"the model does not use {_listed(unknown)}; the update's other tensors were loaded: "
            "use the names of the checkpoint"
        )
    cut = sorted(name for name in _partial_names(ranks) if _is_cut(name, ranks))
    if cut:
        return (
            f"only a part of {_listed(cut)} was loaded, so the shape is wrong; the update's other "
            "tensors were loaded: send all weights again"
        )
    return ""


def _partial_names(ranks: Sequence[Found]) -> set[str]:
    return {name for found in ranks for name in found.partial}


def _is_cut(name: str, ranks: Sequence[Found]) -> bool:
    """Return whether all ranks together loaded less than the whole tensor.

    If several ranks load the same part, for example because they are replicas, the part is counted
    once. Different parts that overlap are each counted in full, so a tensor that was not completely
    loaded may be accepted.
    """
    if any(name not in found.partial and name not in found.unused for found in ranks):
        return False  # a rank loaded all of it, or converted it
    parts = {found.partial[name] for found in ranks if name in found.partial}
    return sum(part.copied for part in parts) < max(part.whole for part in parts)


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
