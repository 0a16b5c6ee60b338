"""memsaver's metrics for Prometheus, through `prometheus_client` (the extra `metrics`).

    memsaver.metrics.register()
    prometheus_client.start_http_server(9100)

Each scrape reads `memsaver.stats()`; nothing is collected between scrapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from memsaver._inspection.statistics import Stats, TagStats, device_memory, stats
from memsaver._runtime.native import STATES
from memsaver.errors import ConfigError, MemsaverError

__all__ = ["Collector", "register"]

_Figures = list[tuple[str, str, Callable[[TagStats], float]]]  # name, help, value

# Per tag and device.
_GAUGES: _Figures = [
    ("resident_bytes", "Device memory in use.", lambda row: row.resident_bytes),
    ("paused_now_bytes", "Device memory that a resume will map.", lambda row: row.paused_now_bytes),
    ("allocated_bytes", "Live allocations, resident or not.", lambda row: row.allocated_bytes),
    ("allocations", "Live allocations.", lambda row: row.allocations),
    ("backup_bytes", "Bytes that the next resume restores.", lambda row: row.backup_bytes),
    ("backup_host_bytes", "Host memory in use for backups.", lambda row: row.host_bytes),
    ("backup_disk_bytes", "File space in use for backups.", lambda row: row.disk_bytes),
    (
        "backup_peer_bytes",
        "Memory of another device in use for backups.",
        lambda row: row.peer_bytes,
    ),
]
_COUNTERS: _Figures = [
    ("paused_bytes", "Device memory that pauses released.", lambda row: row.paused_bytes),
    ("resumed_bytes", "Device memory that resumes mapped.", lambda row: row.resumed_bytes),
    ("saved_bytes", "Bytes that pauses copied to backups.", lambda row: row.saved_bytes),
    ("restored_bytes", "Bytes that resumes restored.", lambda row: row.restored_bytes),
    ("unchanged_bytes", "Bytes that pauses found unchanged.", lambda row: row.unchanged_bytes),
]
# Per tag.
_TAG_GAUGES: _Figures = [
    ("last_pause_seconds", "Duration of the last pause.", lambda row: row.last_pause_seconds),
    ("last_resume_seconds", "Duration of the last resume.", lambda row: row.last_resume_seconds),
]
_TAG_COUNTERS: _Figures = [
    ("pauses", "Pauses done.", lambda row: row.pauses),
    ("resumes", "Resumes done.", lambda row: row.resumes),
    ("failures", "Pauses, resumes and swaps that failed.", lambda row: row.failures),
    ("pause_seconds", "Time spent in pauses.", lambda row: row.pause_seconds),
    ("resume_seconds", "Time spent in resumes.", lambda row: row.resume_seconds),
]


class Registry(Protocol):
    """A registry of metrics, such as a `prometheus_client.CollectorRegistry`."""

    def register(self, collector: Any) -> None:
        """Call the collector at each scrape from now on."""

    def unregister(self, collector: Any) -> None:
        """Stop calling the collector."""


@dataclass(frozen=True)
class Collector:
    """The collector of memsaver's metrics. Any thread. All collectors are equal."""

    def describe(self) -> Iterator[Any]:
        """Yield the metrics of a process without tags, so that a registry knows their names.

        Uses neither the library nor the driver.
        """
        return _metrics(Stats((), 0, 0))

    def collect(self) -> Iterator[Any]:
        """Yield the current metrics.

        Yields nothing in a process in which memsaver is inert, such as a forked child. Queries a
        device for its free memory only if tags have memory on it.
        """
        try:
            now = stats()
        except MemsaverError:
            return
        yield from _metrics(now)


def _metrics(now: Stats) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    here = [row for row in now.tags if row.device >= 0]
    tags = {row.tag: row for row in now.tags}.values()
    by_device = [([row.tag, str(row.device)], row) for row in here]
    by_tag = [([row.tag], row) for row in tags]

    for family, figures, labels, rows in (
        (GaugeMetricFamily, _GAUGES, ["tag", "device"], by_device),
        (CounterMetricFamily, _COUNTERS, ["tag", "device"], by_device),
        (GaugeMetricFamily, _TAG_GAUGES, ["tag"], by_tag),
        (CounterMetricFamily, _TAG_COUNTERS, ["tag"], by_tag),
    ):
        for name, text, value in figures:
            metric = family(f"memsaver_{name}", text, labels=labels)
            for of, row in rows:
                metric.add_metric(of, value(row))
            yield metric

    state = GaugeMetricFamily(
        "memsaver_state", "1 for the current state of the tag, else 0.", labels=["tag", "state"]
    )
    for row in tags:
        for one in STATES:
            state.add_metric([row.tag, one], float(row.state == one))
    yield state
    yield GaugeMetricFamily(
        "memsaver_host_bytes", "Host memory in use for all backups.", value=now.host_bytes
    )
    yield GaugeMetricFamily(
        "memsaver_host_available_bytes",
        "Host memory that is available for backups.",
        value=now.host_available_bytes,
    )
    free = GaugeMetricFamily(
        "memsaver_device_free_bytes",
        "Free device memory, as reported by the driver.",
        labels=["device"],
    )
    whole = GaugeMetricFamily(
        "memsaver_device_total_bytes", "The device's memory.", labels=["device"]
    )
    for device in sorted({row.device for row in here}):
        with contextlib.suppress(MemsaverError):  # a lost context reports no memory
            free_bytes, total_bytes = device_memory(device)
            free.add_metric([str(device)], free_bytes)
            whole.add_metric([str(device)], total_bytes)
    yield free
    yield whole


def register(registry: Registry | None = None) -> Collector:
    """Register memsaver's metrics, with names such as `memsaver_resident_bytes`.

    Experimental: may change in any version.

    Bytes and counts are labelled with `tag` and `device`, metrics of the whole tag with `tag`.
    Counters end in `_total`.

    Args:
        registry: the registry; None means `prometheus_client.REGISTRY`.

    Returns:
        The registered collector, for `registry.unregister`. Registering again has no effect.

    Raises:
        ConfigError: prometheus_client is not installed, or the registry already has different
            metrics with these names.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        raise ConfigError(
            "metrics need prometheus_client, which is not installed: "
            "`pip install 'memsaver[metrics]'`"
        ) from None
    collector = Collector()
    where = REGISTRY if registry is None else registry
    try:
        where.register(collector)
    except ValueError as error:  # the registry has metrics with these names
        try:
            where.unregister(collector)
        except KeyError:
            raise ConfigError(
                f"memsaver's metrics cannot be registered, because the registry has different "
                f"metrics with these names: {error}"
            ) from None
        where.register(collector)
    return collector
