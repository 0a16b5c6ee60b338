"""Measure the driver calls and copies that no engine's sleep and wake-up can avoid.

The measurements use the same number of bytes as the engine's tags. They run in a separate process
after the engine has exited:

    sleep_unchanged_ms    bare driver calls that unmap and release all memory
    sleep_changed_ms      a plain pinned copy of the weights to the host; the cache can be released
                          during the copy
    wake_weights_ms       the same copy to the device; the memory can be mapped during the copy
    wake_kv_ms            bare driver calls that allocate and map the cache
"""

from __future__ import annotations

import time
from typing import Any

import workloads
from raw_driver import RawDriver
from saved import PlainCopy
from serve import Worker
from vllm_engine import KV_CACHE, WEIGHTS


class Limits(Worker):
    """A worker that owns memory of the same sizes as the tags.

    Args:
        name: not used.
        weights: the bytes of the weights.
        kv_cache: the bytes of the KV cache.
        wait: the seconds to wait before each step while the driver clears released memory.
    """

    def __init__(self, name: str, weights: int, kv_cache: int, wait: float) -> None:
        del name
        workloads.start_cuda()
        self._driver, self._wait = RawDriver(), wait
        self._plain = PlainCopy(weights)
        for tag, total in ((WEIGHTS, weights), (KV_CACHE, kv_cache)):
            self._driver.setup(tag, total)

    def cycle(self) -> dict[str, Any]:
        """Return each step's duration in milliseconds, by metric."""
        found = {"sleep_changed_ms": self._ms(self._plain.queue_out)}
        found["sleep_unchanged_ms"] = self._ms(lambda: self._all(self._driver.pause))
        found["wake_weights_ms"] = self._ms(self._plain.queue_in)
        found["wake_kv_ms"] = self._ms(lambda: self._driver.resume(KV_CACHE))
        self._driver.resume(WEIGHTS)
        self._all(self._driver.use)
        workloads.synchronise()
        return found

    def _ms(self, step: Any) -> float:
        time.sleep(self._wait)
        return workloads.timed_ms(step)

    def _all(self, call: Any) -> None:
        for tag in (KV_CACHE, WEIGHTS):
            call(tag)
