"""Test the benchmarks' helpers without a GPU.

They compute checksums, result rows and performance goals, and manage child processes, host memory
and files.
"""

import inspect
import json
import random

import pytest
from repository import ROOT

from memsaver._inspection.bare_driver import BareDriver

BENCHMARKS = ROOT / "benchmarks"
MIB = 1 << 20


def row(metric, memsaver, ratio, peer="torch_memory_saver"):
    return {"metric": metric, "memsaver": memsaver, "ratio": ratio, "peer": peer}


def test_the_sums_find_a_lost_word_and_pieces_that_changed_places(benchmark_module):
    torch = pytest.importorskip("torch")
    workloads = benchmark_module("workloads")
    tensors = [torch.empty(2 * MIB + 24, dtype=torch.uint8), torch.empty(4096, dtype=torch.int16)]
    workloads.randomise(tensors, seed=3)
    before = workloads.sums(tensors)
    assert len(before) == 4  # two whole pieces, the rest of the first tensor, the second tensor
    again = [torch.empty_like(tensor) for tensor in tensors]
    workloads.randomise(again, seed=3)
    assert torch.equal(workloads.sums(again), before)

    again[0][-1] ^= 1
    assert (workloads.sums(again) != before).tolist() == [False, False, True, False]
    again[0][:MIB], again[0][MIB : 2 * MIB] = tensors[0][MIB : 2 * MIB], tensors[0][:MIB]
    assert (workloads.sums(again) != before).tolist() == [True, True, True, False]
    workloads.change(tensors)
    assert (workloads.sums(tensors) != before).all()
    assert not workloads.all_zero(tensors)
    assert workloads.all_zero([tensor.zero_() for tensor in tensors])


def test_the_decoder_is_195_tensors_of_16_gigabytes(benchmark_module):
    workloads = benchmark_module("workloads")
    assert len(list(workloads.decoder_shapes())) == 195
    assert workloads.decoder_bytes() == 16_060_522_496
    changed = range(195)[benchmark_module("parts.backed").CHANGES["lora"]]
    assert list(changed) == [1, 98]  # 1 % of the tensors, without the largest ones


def test_a_row_has_medians_a_ratio_and_every_value(benchmark_module):
    results = benchmark_module("results")
    found = results.measurement("x_ms", [1.0, 9.0, 2.0], "peer", [10.0, 8.0, 7.0], [0.5, 1.5])
    assert (found["memsaver"], found["peer_value"], found["limit"]) == (2.0, 8.0, 1.0)
    assert found["ratio"] == 4.0
    assert found["detail"]["memsaver"] == [1.0, 9.0, 2.0]
    assert set(found) <= set(results.KEYS)
    assert results.measurement("x_MiB", [-3.0], "peer", [16.0])["ratio"] == 16.0
    rate = results.percentage("x_rate", [300.0], "plain", [291.0])
    assert (rate["memsaver"], rate["ratio"]) == (97.0, 0.97)


def test_metrics_have_their_goals(benchmark_module):
    report = benchmark_module("report")
    retained = "torch_memory_saver, retained backup"
    goals = {
        ("kv_64GiB_pause_ms", "any"): 1.0,
        ("many_10k_resume_at_once_ms", "any"): None,
        ("backed_changed_pause_ms", "torch_memory_saver"): 14.0,
        ("backed_changed_pause_ms", retained): None,
        ("backed_unchanged_pause_ms", "torch_memory_saver"): None,
        ("backed_unchanged_pause_ms", retained): 20.0,
        ("swap_16GB_ms", "memsaver, pause then resume"): 1.7,
        ("swap_64GiB_ms", "torch_memory_saver"): 5.0,
        ("swap_64GiB_spaced_ms", "torch_memory_saver"): None,
        ("lora_pause_ms", retained): None,
        ("malloc_free_pair_2MiB_ns", "the runtime's own functions"): 0.9901,
    }
    for (metric, peer), ratio in goals.items():
        found = report.goal(metric, peer)
        assert (found and found.ratio) == ratio, metric


@pytest.mark.parametrize(("mib", "met"), [(256.0, "yes"), (256.1, "not met"), (-1.0, "yes")])
def test_an_upper_bound_is_of_the_value_whatever_the_ratio(benchmark_module, mib, met):
    overhead = row("host_overhead_paused_MiB", mib, ratio=99.0)
    assert benchmark_module("report").verdict(overhead, [overhead]) == met


def test_either_the_peer_or_the_disk_must_be_reached(benchmark_module):
    verdict = benchmark_module("report").verdict
    slow, fast = row("disk_pause_ms", 9.0, 1.5), row("disk_pause_ms", 9.0, 2.5)
    low, high = (
        row("disk_pause_rate", 50, 0.5, "direct"),
        row("disk_pause_rate", 95, 0.95, "direct"),
    )
    assert verdict(slow, [slow, high]) == "by disk_pause_rate"
    assert verdict(slow, [slow, low]) == "not met"
    assert verdict(low, [fast, low]) == "by disk_pause_ms"
    assert verdict(row("lora_pause_ms", 9.0, 0.1), []) == ""


@pytest.mark.parametrize("part", sorted(path.stem for path in BENCHMARKS.glob("parts/*.py")))
def test_no_worker_has_a_setting_that_its_child_takes_for_itself(benchmark_module, part):
    worker = benchmark_module("serve").Worker
    taken = {*inspect.signature(benchmark_module("children").Child).parameters} - {
        "name",
        "settings",
    }
    found = vars(benchmark_module(f"parts.{part}")).values()
    for kind in (kind for kind in found if isinstance(kind, type) and issubclass(kind, worker)):
        assert not taken & {*inspect.signature(kind).parameters}, kind


def test_the_rows_of_the_backed_part(benchmark_module):
    backed = benchmark_module("parts.backed")
    first = {"memsaver": [400.0], "tms": [4700.0]}
    later = {
        "memsaver": {
            "changed_pause": [300.0],
            "changed_resume": [298.0],
            "changed_plain_out": [291.0],
            "changed_plain_in": [290.0],
            "unchanged_pause": [15.0],
        },
        "tms": {"changed_pause": [4700.0], "changed_resume": [1400.0], "unchanged_pause": [4700]},
    }
    rows = {found["metric"]: found for found in backed.rows(first, later)}
    assert rows["backed_first_pause_ms"]["ratio"] == 11.75
    assert rows["backed_changed_pause_ms"]["limit"] == 291.0
    assert rows["backed_changed_pause_rate"]["memsaver"] == 97.0
    assert rows["backed_changed_resume_ms"]["limit"] == 290.0
    assert "lora_pause_ms" not in rows
    assert not list(backed.rows({"tms": [1.0]}, {"tms": later["tms"]}))  # memsaver had failed


WORKER = """
import os, time
class Echo:
    imports = ()
    def __init__(self, name, factor):
        self.name, self.factor = name, factor
        os.write(1, b"a library prints\\n")
    def times(self, value):
        return {"product": value * self.factor, "name": self.name}
    def fail(self):
        raise OSError("no luck")
    def end(self):
        os._exit(7)
    def sleep(self):
        time.sleep(60)
"""


@pytest.fixture
def echo(benchmark_module, tmp_path, monkeypatch):
    (tmp_path / "echoing.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with benchmark_module("children").Child("echoing:Echo", "somebody", factor=3) as child:
        yield child


def test_a_child_answers_and_continues_after_an_error(benchmark_module, echo, capsys):
    echo.ready()
    assert echo.ask("times", value=5) == {"product": 15, "name": "somebody"}
    with pytest.raises(
        benchmark_module("children").Failed, match="somebody, fail: OSError: no luck"
    ):
        echo.ask("fail")
    assert "Traceback" in capsys.readouterr().err
    assert echo.ask("times", value=100_000)["product"] == 300_000


def test_a_child_that_ends_or_hangs_is_a_failure(benchmark_module, echo):
    failed = benchmark_module("children").Failed
    with pytest.raises(failed, match="ended in end, status 7"):
        echo.ask("end")
    with pytest.raises(failed, match="ended"):
        echo.ask("times", value=1)
    with benchmark_module("children").Child("echoing:Echo", "sleeper", factor=3) as child:
        with pytest.raises(failed, match=r"sleeper did not answer sleep in 1 s"):
            child.ask("sleep", within=1)


def test_host_memory_is_seen_while_it_is_held(benchmark_module):
    host_memory = benchmark_module("host_memory")
    size = 256 * MIB
    before = host_memory.in_use()
    held = bytearray(size)
    held[::4096] = b"\1" * len(held[::4096])
    process, _ = host_memory.growth(before, host_memory.in_use())
    assert process >= 0.9 * size
    assert host_memory.growth({"machine": 5}, {"machine": 9}) == (4, 4)
    del held
    assert "touched 0.1 GiB" in host_memory.touch_elsewhere(64 * MIB)


def test_direct_io_and_the_page_cache(benchmark_module, tmp_path):
    direct_io = benchmark_module("direct_io")
    data = random.Random(1).randbytes(MIB)
    (tmp_path / "named").write_bytes(data)
    with (tmp_path / "unnamed").open("w+b") as file:
        (tmp_path / "unnamed").unlink()
        file.write(data)
        file.flush()
        assert direct_io.drop_page_cache(tmp_path) == 2
        file.seek(0)
        assert file.read() == data
    assert (tmp_path / "named").read_bytes() == data
    try:
        disk = direct_io.DirectFile(tmp_path, 2 * direct_io.PIECE)
    except OSError:
        pytest.skip("the file system of the temporary directory has no direct I/O")
    assert disk.write_ms() > 0 and disk.read_ms() > 0
    disk.close()
    assert [path.name for path in tmp_path.iterdir()] == ["named"]


def test_the_drivers_bare_calls(benchmark_module, sim):
    raw_driver = benchmark_module("raw_driver")
    driver, idle = raw_driver.RawDriver(), sim.physical()
    with BareDriver().context(0):
        size = driver.setup("kv", (1 << 30) + 1)
        assert size == (1 << 30) + 2 * MIB and sim.physical() == idle + size
        driver.pause("kv")
        assert sim.physical() == idle
        driver.resume("kv")
        assert sim.physical() == idle + size
    driver._memory["kv"].close()  # the benchmark's process frees it by exiting
    assert raw_driver.count_gpus() == 1


def test_the_readme_table_shows_both_settings_of_the_peer(benchmark_module):
    readme_table = benchmark_module("readme_table")
    retained = "torch_memory_saver, retained backup"
    common = {"gpu": "G", "date": "2026-01-01", "versions": {"torch": "2"}}
    rows = [
        {"metric": "backed_unchanged_pause_ms", "memsaver": 15.0, "peer": peer, "peer_value": value}
        | {"ratio": round(value / 15.0, 2), **common}
        for peer, value in (("torch_memory_saver", 4700.0), (retained, 300.0))
    ]
    table = readme_table.table(json.loads(json.dumps(rows)))
    assert "nothing changed, ms | 15.0 | 4,700.0 (313x) | 300.0 (20.00x) |" in table
    table = readme_table.table(rows[:1])
    assert "| 15.0 | 4,700.0 (313x) | not measured |" in table


def test_the_table_of_vllm_shows_both_allocators_or_that_nothing_was_measured(benchmark_module):
    readme_table = benchmark_module("readme_table")
    row = {"bench": "vllm_cycle", "metric": "vllm_wake_kv_ms", "memsaver": 20.0, "peer_value": 30.0}
    row |= {"ratio": 1.5, "gpu": "G", "date": "2026-01-01", "versions": {"torch": "2"}}
    row["peer"] = "vLLM's own allocator"

    def table(bench):
        wanted = "vllm_cycle", readme_table.ENGINES, readme_table.figure
        return readme_table.framework_tables.table([row | {"bench": bench}], *wanted)

    assert "| wake the KV cache, ms | 20.0 | vLLM's own allocator | 30.0 | 1.50 |" in table(
        "vllm_cycle"
    )
    assert table("other") == "Not measured yet."


def test_a_recorded_timeline_contains_no_path_of_the_tree(benchmark_module):
    pytest.importorskip("torch")
    saved = f'{{"caller": "{ROOT}/benchmarks/shared_gpu.py:73 in step"}}'
    plain = benchmark_module("shared_gpu").without_root(saved)
    assert plain == '{"caller": "benchmarks/shared_gpu.py:73 in step"}'
