"""The logger of the vLLM plugin.

The logger is a child of vLLM's own logger, because vLLM adds a handler only to that logger. The
plugin's lines therefore have the same format, level and stream as vLLM's lines in every process.
"""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("vllm.memsaver")
