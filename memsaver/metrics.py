"""Prometheus metrics for memsaver, through `prometheus_client` (the extra `metrics`).

    memsaver.metrics.register()
    prometheus_client.start_http_server(9100)

Each scrape reads `memsaver.stats()`. No data is collected between scrapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from memsaver._inspection.statistics import Stats, device_memory, stats
from memsaver._runtime.native import _C, STATES
from memsaver.errors import ConfigError, MemsaverError

__all__ = ["Collector", "register"]


class _Figure(NamedTuple):
    """A metric for each tag, or for each tag and device."""

    field: str  # of TagStats
    help: str
    is_counter: bool
    is_of_tag: bool  # equal in the tag's rows for all devices

    @property
    def name(self) -> str:
        """The metric's name. Backup sizes have a longer prefix, because `memsaver_host_bytes` is
        the total of all tags.
        """
        in_use_for_backups = self.field in ("host_bytes", "disk_bytes", "peer_bytes")
        return f"memsaver_backup_{self.field}" if in_use_for_backups else f"memsaver_{self.field}"


def _figures() -> Iterator[_Figure]:
    """Yield a metric for each statistic.

    All counts are Prometheus counters. Totals that also exist for the last transition are counters
    too: for example, `paused_bytes` is one, because `last_paused_bytes` exists.
    """
    yield _Figure("paused_now_bytes", "Device memory that a resume will map.", False, False)
    meanings = _C.usage_meanings()
    for field, meaning in meanings.items():
        is_count = field in ("pauses", "resumes", "failures")
        yield _Figure(
            field,
            f"{meaning[0].upper()}{meaning[1:]}.",
            is_counter=is_count or f"last_{field}" in meanings,
            is_of_tag=is_count or field.endswith("_seconds"),
        )


class Registry(Protocol):
    """A registry of metrics, such as a `prometheus_client.CollectorRegistry`."""

    def register(self, collector: Any) -> None:
        """Call the collector at each future scrape."""

    def unregister(self, collector: Any) -> None:
        """Stop calling the collector."""


@dataclass(frozen=True)
class Collector:
    """The collector of memsaver's metrics. Thread-safe. All collectors compare equal."""

    def describe(self) -> Iterator[Any]:
        """Yield the metrics of a process without tags, so that a registry knows their names.

        Opens no driver.
        """
        return _metrics(Stats((), 0, 0))

    def collect(self) -> Iterator[Any]:
        """Yield the current metrics.

        There are no metrics in a process in which memsaver is inert, such as a forked child. A
        device's free memory is queried only if tags have memory on it.
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
    for figure in _figures():
        family = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
        labels = ["tag"] if figure.is_of_tag else ["tag", "device"]
        metric = family(figure.name, figure.help, labels=labels)
        for row in tags if figure.is_of_tag else here:
            of = [str(getattr(row, label)) for label in labels]
            metric.add_metric(of, getattr(row, figure.field))
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

    Experimental: this API can change in any version.

    Metrics have the labels `tag` and `device`. Metrics of a whole tag, such as the number and
    duration of its pauses, have only the label `tag`. Counters end in `_total`.

    Args:
        registry: the registry; None means `prometheus_client.REGISTRY`.

    Returns:
        The registered collector, which can be passed to `registry.unregister`. Registering again
        has no effect.

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
