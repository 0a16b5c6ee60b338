"""Tests the benchmark of page transfers: layouts, driver calls on the simulator, and rows."""

import importlib

import pytest
from repository import ROOT

from memsaver.cli.bare_driver import BareDriver

MIB = 1 << 20


@pytest.fixture
def layouts(benchmark_module):
    return benchmark_module("weight_layouts")


@pytest.fixture
def page_shares(benchmark_module):
    return benchmark_module("page_shares")


def total(layout):
    return sum(run.nbytes for allocation in layout for run in allocation)


# --- layouts and pages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_layouts_have_all_parameters_of_the_model(layouts, name, parameters):
    model = layouts.MODELS[name]
    assert total(layouts.engine(model, 0, 1)) == 2 * parameters
    assert total(layouts.whole(model, 0, 1)) == 2 * parameters
    assert total(layouts.megatron(model, 0, 1)) == 2 * parameters
    shards = [total(layouts.fsdp2(model, rank, 2)) for rank in range(2)]
    assert sum(shards) == 2 * parameters


@pytest.mark.parametrize("trainer", ["fsdp2", "megatron", "megatron_buffer"])
def test_engine_and_trainer_ranks_have_the_same_bytes(layouts, trainer):
    """The test compares the offsets of q, k and v, which reveals missing or misplaced bytes."""
    model = layouts.MODELS["Qwen3-0.6B"]

    def attention_bytes(layout):
        found = {}
        for run in (run for allocation in layout for run in allocation):
            if run.tensor in ("3.q", "3.k", "3.v"):
                found.setdefault(run.tensor, set()).update(
                    range(run.offset, run.offset + run.nbytes, 1024)
                )
        return found

    ours = attention_bytes(layouts.engine(model, 1, 2))
    assert len(ours) == 3
    assert attention_bytes(getattr(layouts, trainer)(model, 1, 2)) == ours


def test_torchs_allocator_rounds_and_divides_segments(page_shares):
    allocator = page_shares.TorchAllocator()
    sizes = {100: 0, 513: 512, 3 * MIB: 2 * MIB, 18 * MIB + 1: 22 * MIB, 10 * MIB: 5 * MIB}
    assert [allocator.allocate(size) for size in sizes] == list(sizes.values())
    assert allocator.end == 42 * MIB
    assert allocator.allocate(MIB) == 1536  # in the first segment
    assert allocator.allocate(MIB) == 42 * MIB  # its rest is too small
    assert allocator.allocate(MIB + 1) == 40 * MIB + 512  # the smallest rest that is enough
    assert allocator.allocate(MIB + 1) == 15 * MIB


def test_pages_are_equal_only_with_the_same_bytes_at_the_same_place(page_shares, layouts):
    run = layouts.Run
    page = page_shares.PAGE
    ours = [(0, run("a", 0, 3 * page)), (3 * page, run("b", 0, page))]
    moved = [(2 * page, run("a", 0, 3 * page)), (8 * page, run("b", 0, page))]
    assert page_shares.share(ours, ours, page) == (4 * page, 1)
    assert page_shares.share(ours, moved, page) == (4 * page, 2)
    assert page_shares.share(ours, moved, 2 * page) == (2 * page, 1)
    shifted = [(512, run("a", 0, 3 * page)), (8 * page, run("b", 0, page))]
    assert page_shares.share(ours, shifted, page) == (page, 1)
    halves = [(0, run("a", 0, page // 2)), (page // 2, run("a", page // 2, 3 * page - page // 2))]
    assert page_shares.share(ours, halves, page) == (3 * page, 1)
    also_another = [(0, run("a", 0, page // 2)), (page // 2, run("c", 0, 8))]
    assert page_shares.share([(0, run("a", 0, page // 2))], also_another, page) == (0, 0)


@pytest.fixture(scope="module")
def shares():
    """Return the computed rows. The computation takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return list(importlib.import_module("page_shares").shares())


def test_shares_depend_on_the_layout(page_shares, shares):
    found = {
        (row["model"], row["engine_ranks"], row["trainer"], row["placement"]): row for row in shares
    }
    assert len(found) == 2 * len(page_shares.CASES)
    same = found["Qwen3-8B", 1, "whole tensors", "torch"]
    assert same["2_MiB"] > 99.9 and same["256_MiB"] < 10
    # o_proj and down_proj are divided by columns.
    assert 70 < found["Qwen3-8B", 2, "whole tensors", "torch"]["2_MiB"] < 71
    assert found["Qwen3-8B", 2, "Megatron, distributed optimizer", "torch"]["32_MiB"] == 0
    assert found["Qwen3-30B-A3B", 1, "whole tensors", "boundaries"]["2_MiB"] < 40


# --- the driver's calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [2, 32, 1024])
def test_the_engine_has_the_trainers_contents_in_each_way(benchmark_module, sim, piece):
    driver, before, idle = BareDriver(), sim.counts(), sim.physical()
    with driver.context(0):
        sides = benchmark_module("parts.take_over").Sides(driver, 70 * MIB, piece * MIB, gap=0)
        for way in (sides.awake, sides.asleep, sides.copied, sides.awake):
            assert all(ms >= 0 for ms in way().values())
            assert sim.accessible(sides.trainer.address) and sim.accessible(sides.engine.address)
        sides.close()
    after = sim.counts()
    assert sim.physical() == idle
    for kind in ("handles", "mappings", "reservations"):
        assert getattr(after, kind) == getattr(before, kind), kind


def test_pieces_in_the_wrong_order_are_a_failure(benchmark_module, sim):
    driver = BareDriver()
    with driver.context(0):
        sides = benchmark_module("parts.take_over").Sides(driver, 8 * MIB, 2 * MIB, gap=0)
        imports = sides.engine.import_from

        def reversed_imports(owner):
            imports(owner)
            sides.engine._handles.reverse()

        sides.engine.import_from = reversed_imports
        with pytest.raises(benchmark_module("children").Failed, match="other contents"):
            sides.awake()
        sides.close()


def test_a_failed_import_is_released(benchmark_module, sim):
    driver, before = BareDriver(), sim.counts()
    with driver.context(0):
        sides = benchmark_module("parts.take_over").Sides(driver, 8 * MIB, 2 * MIB, gap=0)
        with (
            sim.fault("cuMemImportFromShareableHandle", 999, nth=3),
            pytest.raises(Exception, match="cuMemImportFromShareableHandle"),
        ):
            sides.awake()
        sides.close()
    assert sim.counts().handles == before.handles


# --- rows and the page ----------------------------------------------------------------------------


def test_the_page_has_the_measured_times(benchmark_module, shares, monkeypatch):
    page = benchmark_module("take_over_page")
    monkeypatch.setattr(page.page_shares, "shares", lambda: shares)
    there = page.PAGE.read_text()
    assert page.rewritten(there, page.results.measured()) == there, "make pages"
