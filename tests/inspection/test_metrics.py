"""Tests that metrics, as parsed by Prometheus, equal the statistics."""

import dataclasses
from typing import get_args

import prometheus_client
import pytest

import memsaver

MIB = 1 << 20


COUNTERS_OF_TAGS = {"pauses", "resumes", "failures", "pause_seconds", "resume_seconds"}
COUNTERS = COUNTERS_OF_TAGS | {
    *("paused_bytes", "resumed_bytes", "saved_bytes", "restored_bytes"),
    *("unchanged_bytes", "unchanged_pieces"),
}
GAUGES_OF_TAGS = {"last_pause_seconds", "last_resume_seconds"}
OTHER_NAMES = {
    "host_bytes": "backup_host_bytes",
    "disk_bytes": "backup_disk_bytes",
    "peer_bytes": "backup_peer_bytes",
}


@pytest.fixture
def scrape(tag, monkeypatch):
    """Scrape the metrics of this test's tags and the metrics without a tag; return values by
    name and labels.
    """

    def stats_of_this_test():
        now = memsaver.stats()
        return dataclasses.replace(now, tags=[row for row in now.tags if row.tag in tag.names])

    from prometheus_client.parser import text_string_to_metric_families

    monkeypatch.setattr(memsaver.metrics, "stats", stats_of_this_test)
    registry = prometheus_client.CollectorRegistry()
    collector = memsaver.metrics.register(registry)

    def read():
        text = prometheus_client.generate_latest(registry).decode()
        found = {}
        for family in text_string_to_metric_families(text):
            assert family.documentation and family.name.startswith("memsaver_")
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in found, f"{key} is there twice"
                assert sample.name.endswith("_total") == (family.type == "counter")
                found[key] = sample.value
        return found

    yield read
    registry.unregister(collector)


def value(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def test_metrics_are_the_statistics(sim, tag, make_blocks, scrape):
    name = tag('with "quotes" \\ and\nlines')
    blocks = make_blocks(name, [4 * MIB], backup="host")
    memsaver.pause(name)
    memsaver.resume(name)
    memsaver.pause(name)
    found = scrape()
    (row,) = memsaver.stats()[name]
    both, alone = {"tag": name, "device": "0"}, {"tag": name}
    fields = {field.name for field in dataclasses.fields(row)[4:]}  # without tag, state and so on
    assert fields > COUNTERS | GAUGES_OF_TAGS | OTHER_NAMES.keys()
    for field in fields | {"paused_now_bytes"}:
        metric = f"memsaver_{OTHER_NAMES.get(field, field)}{'_total' * (field in COUNTERS)}"
        is_of_tag = field in COUNTERS_OF_TAGS | GAUGES_OF_TAGS
        assert value(found, metric, **alone if is_of_tag else both) == getattr(row, field), field
    assert row.unchanged_bytes == 4 * MIB == row.saved_bytes  # not zero
    states = {
        s: value(found, "memsaver_state", tag=name, state=s) for s in get_args(memsaver.State)
    }
    assert states == {"mapped": 0, "saving": 0, "paused": 1, "restoring": 0}
    free, total = memsaver.device_memory(0)
    assert value(found, "memsaver_device_free_bytes", device="0") == free
    assert value(found, "memsaver_device_total_bytes", device="0") == total
    assert value(found, "memsaver_host_bytes") == memsaver.stats().host_bytes
    assert len(blocks) == 1


def test_a_scrape_reports_current_values(sim, tag, make_blocks, scrape):
    name = tag()
    blocks = make_blocks(name, [4 * MIB])
    labels = {"tag": name, "device": "0"}
    assert value(scrape(), "memsaver_resident_bytes", **labels) == 4 * MIB
    memsaver.pause(name)
    assert value(scrape(), "memsaver_resident_bytes", **labels) == 0
    assert value(scrape(), "memsaver_pauses_total", tag=name) == 1
    memsaver.resume(name)
    assert len(blocks) == 1


def test_a_tag_on_two_devices_is_counted_once(run_python):
    run_python(
        """
        import memsaver, prometheus_client
        from memsaver import simulator

        with memsaver.region("t"):
            held = [simulator.buffer(4 << 20, 0), simulator.buffer(6 << 20, 1)]
        memsaver.pause("t")
        registry = prometheus_client.CollectorRegistry()
        memsaver.metrics.register(registry)
        get = registry.get_sample_value
        assert get("memsaver_pauses_total", {"tag": "t"}) == 1
        assert get("memsaver_paused_bytes_total", {"tag": "t", "device": "0"}) == 4 << 20
        assert get("memsaver_paused_bytes_total", {"tag": "t", "device": "1"}) == 6 << 20
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


def test_registering_and_scraping_open_no_driver(run_python):
    """Without tags, a scrape reports no device and does not open the driver."""
    run_python(
        """
        import os, memsaver, prometheus_client
        memsaver.metrics.register()
        text = prometheus_client.generate_latest().decode()
        assert "memsaver_host_bytes" in text and 'device="' not in text
        memsaver.device_memory(0)
        if os.fork() == 0:  # inert: no metrics, and no error
            text = prometheus_client.generate_latest().decode()
            os._exit(0 if "process_" in text and "memsaver_host" not in text else 1)
        assert os.wait()[1] == 0
        """,
        MEMSAVER_DRIVER="sim",
    )


def test_registering_twice_is_registering_once(run_python):
    """The test runs in a separate process, which contains no tags from other tests."""
    run_python(
        """
        import memsaver, prometheus_client
        from memsaver import simulator
        from prometheus_client.parser import text_string_to_metric_families

        def text():
            return prometheus_client.generate_latest(registry).decode()

        with memsaver.region("t"):
            block = simulator.buffer(4 << 20)
        registry = prometheus_client.CollectorRegistry()
        memsaver.metrics.register(registry)
        once = [line for line in text().splitlines() if line.startswith("#")]
        again = memsaver.metrics.register(registry)
        lines = text().splitlines()
        assert [line for line in lines if line.startswith("#")] == once
        series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
        assert len(series) == len(set(series)) > len(once) / 2
        names = [family.name for family in text_string_to_metric_families(text())]
        assert len(names) == len(set(names))
        registry.unregister(again)
        assert text() == ""
        memsaver.metrics.register(registry)
        assert "memsaver_resident_bytes" in text()
        other = prometheus_client.CollectorRegistry()
        memsaver.metrics.register(other)  # one more for each registry
        assert "memsaver_resident_bytes" in prometheus_client.generate_latest(other).decode()
        """
    )


def test_names_that_are_somebody_elses_are_left_to_them(sim):
    registry = prometheus_client.CollectorRegistry()
    mine = prometheus_client.Gauge("memsaver_host_bytes", "Not memsaver's.", registry=registry)
    mine.set(7)
    with pytest.raises(memsaver.ConfigError, match="memsaver_host_bytes"):
        memsaver.metrics.register(registry)
    assert "memsaver_host_bytes 7" in prometheus_client.generate_latest(registry).decode()


def test_without_the_client_the_error_gives_advice(run_python):
    run_python(
        """
        import sys
        sys.modules["prometheus_client"] = None
        import memsaver
        try:
            memsaver.metrics.register()
        except memsaver.ConfigError as error:
            assert "memsaver[metrics]" in str(error), error
        else:
            raise AssertionError
        """
    )
