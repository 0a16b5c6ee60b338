"""The logger of the vLLM plugin.

The logger is a child of vLLM's own logger, because vLLM adds a handler only to that logger. Lines
of the plugin therefore have the format, the level and the stream of vLLM's lines in every process.
"""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("vllm.memsaver")
