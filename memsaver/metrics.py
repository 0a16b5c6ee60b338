"""memsaver's figures for Prometheus, through `prometheus_client` (the extra `metrics`).

    memsaver.metrics.register()
    prometheus_client.start_http_server(9100)

Nothing is counted for it: each scrape reads `memsaver.stats()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from memsaver.errors import ConfigError, MemsaverError
from memsaver.native import State
from memsaver.statistics import Stats, TagStats, device_memory, stats

__all__ = ["Collector", "register"]

_Figures = list[tuple[str, str, Callable[[TagStats], float]]]  # name, help, value

# Of each tag and device.
_GAUGES: _Figures = [
    ("resident_bytes", "Device memory held.", lambda row: row.resident_bytes),
    ("paused_now_bytes", "Device memory that a resume takes.", lambda row: row.paused_now_bytes),
    ("allocated_bytes", "Live allocations, resident or not.", lambda row: row.allocated_bytes),
    ("allocations", "Live allocations.", lambda row: row.allocations),
    ("backup_bytes", "Bytes that the next resume brings back.", lambda row: row.backup_bytes),
    ("backup_host_bytes", "Host memory held for backups.", lambda row: row.host_bytes),
    ("backup_disk_bytes", "File space held for backups.", lambda row: row.disk_bytes),
]
_COUNTERS: _Figures = [
    ("paused_bytes", "Device memory that pauses gave back.", lambda row: row.paused_bytes),
    ("resumed_bytes", "Device memory that resumes took.", lambda row: row.resumed_bytes),
    ("saved_bytes", "Bytes that pauses copied to backups.", lambda row: row.saved_bytes),
    ("restored_bytes", "Bytes that resumes copied from them.", lambda row: row.restored_bytes),
    ("unchanged_bytes", "Bytes that pauses found saved.", lambda row: row.unchanged_bytes),
]
# Of each tag, whatever its devices.
_TAG_GAUGES: _Figures = [
    ("last_pause_seconds", "How long the last pause took.", lambda row: row.last_pause_seconds),
    ("last_resume_seconds", "How long the last resume took.", lambda row: row.last_resume_seconds),
]
_TAG_COUNTERS: _Figures = [
    ("pauses", "Pauses done.", lambda row: row.pauses),
    ("resumes", "Resumes done.", lambda row: row.resumes),
    ("failures", "Pauses, resumes and swaps that failed.", lambda row: row.failures),
    ("pause_seconds", "Time spent in pauses.", lambda row: row.pause_seconds),
    ("resume_seconds", "Time spent in resumes.", lambda row: row.resume_seconds),
]


class Registry(Protocol):
    """What metrics are registered in: a `prometheus_client.CollectorRegistry`."""

    def register(self, collector: Any) -> None:
        """Ask it at each scrape from now on."""

    def unregister(self, collector: Any) -> None:
        """Ask it no more."""


@dataclass(frozen=True)
class Collector:
    """What a registry asks for memsaver's metrics. Any thread. Any two are equal."""

    def describe(self) -> Iterator[Any]:
        """The metrics of a process without tags, so that a registry knows their names.

        That asks neither the library nor the driver.
        """
        return _metrics(Stats((), 0, 0))

    def collect(self) -> Iterator[Any]:
        """The metrics, as they are now.

        In a process in which memsaver cannot be asked (a forked child, say) there are none. A
        device is asked for its free memory only where a tag has memory of it.
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
        "memsaver_state", "1 for the state that the tag is in, else 0.", labels=["tag", "state"]
    )
    for row in tags:
        for one in State:
            state.add_metric([row.tag, one.value], float(row.state is one))
    yield state
    yield GaugeMetricFamily(
        "memsaver_host_bytes", "Host memory held for all backups.", value=now.host_bytes
    )
    yield GaugeMetricFamily(
        "memsaver_host_available_bytes",
        "Host memory that backups may still take.",
        value=now.host_available_bytes,
    )
    free = GaugeMetricFamily(
        "memsaver_device_free_bytes", "Free, as the driver says.", labels=["device"]
    )
    whole = GaugeMetricFamily(
        "memsaver_device_total_bytes", "The device's memory.", labels=["device"]
    )
    for device in sorted({row.device for row in here}):
        with contextlib.suppress(MemsaverError):  # a context that is gone has no figures
            free_bytes, total_bytes = device_memory(device)
            free.add_metric([str(device)], free_bytes)
            whole.add_metric([str(device)], total_bytes)
    yield free
    yield whole


def register(registry: Registry | None = None) -> Collector:
    """Offer memsaver's metrics in a registry, by names such as `memsaver_resident_bytes`.

    Bytes and counts are labelled with `tag` and `device`, what is the same on all devices of a tag
    with `tag`. Counters end in `_total`.

    Args:
        registry: where; None is `prometheus_client.REGISTRY`.

    Returns:
        What was registered, for `registry.unregister`. Registering twice is registering once.

    Raises:
        ConfigError: prometheus_client is not installed; or the registry has metrics of these names
            already that are not memsaver's.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        raise ConfigError(
            "metrics need prometheus_client, which is not installed: "
            "`pip install memsaver[metrics]`"
        ) from None
    collector = Collector()
    where = REGISTRY if registry is None else registry
    try:
        where.register(collector)
    except ValueError as error:  # it has metrics of these names
        try:
            where.unregister(collector)
        except KeyError:
            raise ConfigError(
                f"memsaver's metrics cannot be registered, as the registry has others of their "
                f"names: {error}"
            ) from None
        where.register(collector)
    return collector
