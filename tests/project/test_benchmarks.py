"""Tests the benchmarks' helpers without a GPU.

The helpers compute checksums, result rows and performance goals, and manage child processes, host
memory and files.
"""

import inspect
import os
import random

import pytest
from repository import ROOT

from memsaver.cli.bare_driver import BareDriver

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


@pytest.mark.parametrize(
    ("metric", "peer", "value", "ratio", "met"),
    [
        ("host_overhead_paused_MiB", "", 256.0, 99.0, "yes"),  # a bound of the value, not the ratio
        ("host_overhead_paused_MiB", "", 256.1, 99.0, "not met"),
        ("host_overhead_paused_MiB", "", -1.0, 99.0, "yes"),
        ("rl_kv_tokens_fraction", "memsaver, the engine alone on the GPU", 0.97, 0.97, "yes"),
        ("rl_kv_tokens_fraction", "memsaver, the engine alone on the GPU", 0.9, 0.969, "not met"),
        ("rl_kv_tokens_fraction", "torch_memory_saver", 0.9, 0.5, ""),
        ("rl_transition_seconds", "torch_memory_saver", 2.0, 5.0, "yes"),
        ("rl_transition_seconds", "torch_memory_saver", 2.0, 4.9, "not met"),
        ("rl_transition_seconds", "torch_memory_saver, retained backup", 2.0, 1.0, ""),
        ("rl_transition_seconds", "torch_memory_saver", 2.0, None, "no peer"),
        ("sglang_release_weights_ms", "torch_memory_saver", 400.0, 12.5, "yes"),
        ("sglang_release_weights_unchanged_ms", "torch_memory_saver", 400.0, 12.5, "not met"),
        ("sglang_decode_tokens_per_s", "torch_memory_saver", 1400.0, 0.9929, "yes"),
        ("sglang_decode_tokens_per_s", "torch_memory_saver", 1400.0, 0.9859, "not met"),
        ("sglang_max_mem_fraction", "torch_memory_saver", 0.94, 1.093, "yes"),
        ("sglang_max_mem_fraction", "torch_memory_saver", 0.86, 1.0488, "not met"),
        ("sglang_max_mem_fraction", "torch_memory_saver", 0.94, 1.0444, "not met"),
        ("verl_cycles_change_MiB", "torch_memory_saver", 64.0, 0.1, "yes"),
        ("verl_tp2_left_MiB", "the largest allowed value", 65.0, 0.9, "not met"),
        ("vllm_sleep_first_ms", "vLLM", 1.0, 9.9, "not met"),
        ("vllm_tp2_sleep_first_ms", "vLLM", 1.0, 8.5, "yes"),
    ],
)
def test_rows_reach_or_miss_their_goals(benchmark_module, metric, peer, value, ratio, met):
    found = row(metric, value, ratio, peer) | {"peer_value": ratio and value * ratio}
    if metric == "sglang_max_mem_fraction":
        found["peer_value"] = round(value / ratio, 2)
    assert benchmark_module("report").verdict(found, [found]) == met


@pytest.mark.parametrize(
    ("benchmark", "option"),
    [
        *(("rl_cycle", f"--{one}") for one in ("steps=0", "states=0", "fraction=1", "only=x")),
        ("rl_cycle", "--bucket-mib=a"),
        *(("sglang_cycle", f"--fractions={text}") for text in ("", "0.5,x", "0.5,1.0", "-0.1")),
        ("sglang_kinds", "--only=dense,sparse"),
    ],
)
def test_invalid_options_are_rejected(benchmark_module, capsys, benchmark, option):
    with pytest.raises(SystemExit):
        benchmark_module(benchmark).parser().parse_args([option])
    assert f"argument {option.partition('=')[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "saver", "prefix"),
    [
        ("sglang_engine", "memsaver", "1"),
        ("sglang_engine", "tms", "0"),
        ("sglang_engine", "plain", "0"),
        ("vllm_engine", "memsaver", "1"),
        ("vllm_engine", "vllm", "0"),
    ],
)
def test_an_engines_environment_selects_one_saver(
    benchmark_module, monkeypatch, tmp_path, module, saver, prefix
):
    engine = module.partition("_")[0].upper()
    other = {"sglang": "SGLANG_PLUGINS", "vllm": "VLLM_PLUGINS"}[engine.lower()]
    inherited = {f"MEMSAVER_{engine}": "0", other: "other", "TMS_INIT_ENABLE": "1", "HOME": "/home"}
    inherited |= {"MEMSAVER_SGLANG_ASLEEP": "wait", "NCCL_GRAPH_REGISTER": "1"}
    monkeypatch.chdir(tmp_path)
    found = benchmark_module(module).environment(
        saver, {**inherited, "PYTHONPATH": f"a{os.pathsep}{os.pathsep}/b"}
    )
    assert found[f"MEMSAVER_{engine}"] == prefix and found["HOME"] == "/home"
    assert other not in found and found["NCCL_GRAPH_REGISTER"] == "1"
    if engine == "SGLANG":
        assert not {"MEMSAVER_SGLANG_ASLEEP", "TMS_INIT_ENABLE"} & set(found)
        assert found["PYTHONPATH"] == f"{tmp_path}/a{os.pathsep}/b"
        assert found.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == (None if saver == "plain" else "1")


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


def test_a_recorded_timeline_contains_no_path_of_the_tree(benchmark_module):
    pytest.importorskip("torch")
    saved = f'{{"caller": "{ROOT}/benchmarks/shared_gpu.py:73 in step"}}'
    plain = benchmark_module("shared_gpu").without_root(saved)
    assert plain == '{"caller": "benchmarks/shared_gpu.py:73 in step"}'
