"""The interface of torch_memory_saver 0.0.10, provided by memsaver.

    from torch_memory_saver import torch_memory_saver

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        model = build_model()
    torch_memory_saver.pause("weights")
    torch_memory_saver.resume("weights")

Importing this package does not create a CUDA context, and imports neither torch nor numpy.
"""

from torch_memory_saver.entrypoint import TorchMemorySaver
from torch_memory_saver.hooks.mode_preload import configure_subprocess

torch_memory_saver = TorchMemorySaver()
"""The saver object for programs."""

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]
