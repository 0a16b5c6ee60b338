"""Reload weights layer by layer with vLLM, from buckets whose memory the sender reuses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from memsaver._memory.sharing.wire import domain

from ..engine.weights.adapters import without_adapters

__all__ = ["LayerwiseReload", "domain_of", "is_converted"]

# The methods whose weights, on CUDA devices, stay as the loader writes them.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_PLAIN_LAYERS = ("Attention", "MMEncoderAttention")
_HOOK = "process_weights_after_loading"


def is_converted(model: Any) -> bool:
    """Return whether vLLM changes some weights of a model after its loader has written them."""
    return any(_is_converted(layer) for layer in model.modules())


def domain_of(worker: Any) -> str:
    """Return the domain of processes whose tensors a worker's model can load without a copy.

    The domain is empty if the worker has no model, or if vLLM converts the model's weights. Loading
    into a converted model can write to the sender's tensors, and memsaver does not detect such
    writes.
    """
    try:
        model = worker.model_runner.get_model()
    except (AttributeError, ValueError):  # it is not loaded yet
        return ""
    return "" if is_converted(model) else domain()


def _is_converted(layer: Any) -> bool:
    method = getattr(layer, "quant_method", None)
    if method is not None:
        return type(method).__name__ not in _PLAIN_METHODS
    if not hasattr(layer, _HOOK):
        return False
    if type(layer).__name__ not in _PLAIN_LAYERS:
        return True
    # An attention backend may copy its layer's sinks.
    implementation = getattr(layer, "impl", None)
    own = getattr(type(implementation), _HOOK, None)
    is_usual = own is None or own.__module__ == "vllm.v1.attention.backend"
    return not is_usual and getattr(implementation, "sinks", "") is not None


class LayerwiseReload:
    """A reload of a model's weights in the format of a checkpoint.

    Args:
        model: the model; its layers keep the addresses of their memory.
        config: its `ModelConfig`.
    """

    def __init__(self, model: Any, config: Any) -> None:
        from vllm.model_executor.model_loader import reload

        self._functions: Any = reload
        self._model, self._config = model, config
        with without_adapters(model):
            reload.initialize_layerwise_reload(model)

    def load(self, named: Iterable[tuple[str, Any]]) -> Any:
        """Load tensors; copy tensors of incomplete layers, because the sender owns the memory."""
        tensors = list(named)
        result = self._model.load_weights(iter(tensors))
        storages = {t.untyped_storage().data_ptr() for _, t in tensors if t.numel()}
        for _, info in self._incomplete():
            for _, load in info.loaded_weights:
                for name, value in load.arguments.items():
                    if _is_in(value, storages):
                        load.arguments[name] = value.clone()
        return result

    def end(self, failed: bool) -> None:
        """Complete the layers. After a failed reload, restore the weights of incomplete layers."""
        if failed:
            for _, info in self._incomplete():
                info.loaded_weights, info.load_numel = [], 0
        with without_adapters(self._model):
            self._functions.finalize_layerwise_reload(self._model, self._config)

    def _incomplete(self) -> Iterator[tuple[Any, Any]]:
        for layer in self._model.modules():
            info = self._functions.layerwise.get_layerwise_info(layer)
            if info.can_load():
                yield layer, info


def _is_in(value: Any, storages: set[int]) -> bool:
    import torch

    if not isinstance(value, torch.Tensor) or value.is_meta or not value.numel():
        return False
    return value.untyped_storage().data_ptr() in storages
