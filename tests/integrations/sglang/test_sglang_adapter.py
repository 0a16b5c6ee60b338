"""Tests SGLang's memory saver interface with memsaver: its regions, tags and graphs."""

import os
from contextlib import contextmanager

import pytest
from simulated_driver import Block

import memsaver
from memsaver import ConfigError, InvalidStateError, NotLoadedError
from memsaver._runtime.native import policy_of
from memsaver._transitions import parts
from memsaver.integrations.sglang.adapter import MemsaverAdapter

MIB = 1 << 20


def test_backed_up_contents_return_and_others_are_zero(sim, tag):
    weights, kv = tag("weights"), tag("kv_cache")
    with MemsaverAdapter().region(weights, enable_cpu_backup=True):
        kept = [Block(sim, nbytes, seed) for seed, nbytes in enumerate((3 * MIB, 5000))]
    with MemsaverAdapter().region(tag=kv):
        cache = Block(sim, 4 * MIB, 9)
    saver = MemsaverAdapter()
    saver.pause(kv)
    saver.pause(tag=weights)
    assert not any(sim.accessible(block.address) for block in [*kept, cache])
    assert sim.tag_bytes() == 0
    saver.resume(tag=weights)
    assert all(block.is_intact() for block in kept)
    assert not sim.accessible(cache.address)
    saver.resume(kv)
    assert cache.is_zero()


@pytest.mark.parametrize("place", ["host", "pageable", "disk", "peer"])
def test_a_variable_chooses_the_place_of_backups(sim, tag, options, monkeypatch, tmp_path, place):
    options(disk_dir=str(tmp_path))
    monkeypatch.setenv("MEMSAVER_SGLANG_BACKUP", place)
    weights, kv = tag("weights"), tag("kv_cache")
    saver = MemsaverAdapter()
    with saver.region(weights, enable_cpu_backup=True):
        kept = Block(sim, 3 * MIB, 1)
    with saver.region(kv):
        cache = Block(sim, 3 * MIB, 2)
    assert (policy_of(weights), policy_of(kv)) == (place, "none")
    saver.pause(weights)
    saver.pause(kv)
    [row] = memsaver.stats()[weights]
    assert (row.disk_bytes > 0, row.host_bytes > 0) == (place == "disk", place != "disk")
    saver.resume(weights)
    saver.resume(kv)
    assert kept.is_intact() and cache.is_zero()


def test_backups_may_be_on_another_gpu(run_python):
    run_python(
        """
        import memsaver
        from simulated_driver import Block, Simulator
        from memsaver.integrations.sglang.adapter import MemsaverAdapter
        sim, saver = Simulator(), MemsaverAdapter()
        sim.start(0)
        sim.start(1)
        with saver.region("weights", enable_cpu_backup=True):
            kept = Block(sim, 3 << 20, 1, 0)
        saver.pause("weights")
        [row] = memsaver.stats()["weights"]
        assert row.peer_bytes >= 3 << 20 and row.host_bytes == 0, row
        saver.resume("weights")
        assert kept.is_intact()
        """,
        with_memsaver=True,
        MEMSAVER_SIM_DEVICES=2,
        MEMSAVER_SGLANG_BACKUP="peer",
        MEMSAVER_PEER_MARGIN_BYTES=0,
    )


def test_a_tag_that_was_never_used_is_passed_over(sim, tag):
    """SGLang releases `cuda_graph` even if no graph was captured in this tag."""
    saver, name = MemsaverAdapter(), tag("cuda_graph")
    assert saver.pause(name) is None
    assert saver.resume(name) is None
    assert name not in {row.tag for row in memsaver.stats().tags}
    with pytest.raises(ConfigError):
        saver.pause("")


def test_doing_it_twice_is_harmless(sim, tag):
    saver, name = MemsaverAdapter(), tag()
    with saver.region(name, enable_cpu_backup=True):
        block = Block(sim, MIB, 1)
    assert saver.resume(name).changes[0].changed is False
    for _ in range(2):
        saver.pause(name)
        assert not sim.accessible(block.address)
    for _ in range(2):
        saver.resume(name)
        assert block.is_intact()


@pytest.mark.parametrize("kept_first", [True, False])
def test_two_policies_in_one_tag(sim, tag, kept_first):
    """A draft model's weights are backed up; the main model's weights in the same tag are not."""
    saver, name = MemsaverAdapter(), tag("weights")
    blocks = {}
    for keep in (kept_first, not kept_first, kept_first):
        with saver.region(name, enable_cpu_backup=keep):
            blocks.setdefault(keep, []).append(Block(sim, 2 * MIB, len(blocks)))
    both = [*blocks[True], *blocks[False]]
    assert parts.names_of(name)[0] == name and len(parts.names_of(name)) == 2
    saver.pause(name)
    assert not any(sim.accessible(block.address) for block in both)
    rows = [row for beside in parts.names_of(name) for row in memsaver.stats()[beside]]
    saved = sum(row.backup_bytes for row in rows)
    assert saved == sum(block.nbytes for block in blocks[True])
    saver.resume(name)
    assert all(block.is_intact() for block in blocks[True])
    assert all(block.is_zero() for block in blocks[False])
    both.clear()
    blocks.clear()
    memsaver.trim(wait=True)


def test_two_policies_are_resumed_together_or_not_at_all(sim, tag):
    saver, name = MemsaverAdapter(), tag("weights")
    blocks = []
    for keep in (False, True):
        with saver.region(name, enable_cpu_backup=keep):
            blocks.append(Block(sim, 8 * MIB, 1))
    saver.pause(name)
    free = memsaver.device_memory(0)[0]
    sim.occupy(free - 12 * MIB)
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        saver.resume(name)
    assert [memsaver.state(beside) for beside in parts.names_of(name)] == ["paused"] * 2
    assert sim.tag_bytes() == 0
    sim.occupy(0)
    saver.resume(name)
    assert blocks[0].is_zero() and blocks[1].is_intact()
    del blocks
    memsaver.trim(wait=True)


def test_a_tag_of_the_process_s_own_is_paused_too(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    MemsaverAdapter().pause(name)
    assert not sim.accessible(block.address)
    MemsaverAdapter().resume(name)
    assert block.is_intact()


def test_disable_keeps_memory_out_of_the_tag(sim, tag):
    saver, name = MemsaverAdapter(), tag()
    with saver.region(name):
        inside = Block(sim, MIB, 1)
        with saver.disable(), pytest.raises(InvalidStateError):
            Block(sim, MIB, 2)  # the simulator allocates for regions only
    assert len(memsaver.ranges(name)) == 1
    assert inside.is_intact()


@pytest.mark.parametrize("more", [{}, {"enable_cpu_backup": True}], ids=["0.5.16", "0.5.23"])
def test_graphs_are_captured_in_the_given_tag(sim, tag, monkeypatch, more):
    """The fake capture receives all arguments and allocates in the given tag."""
    name, pool, stream, graph = tag("cuda_graph"), (0, 7), object(), object()
    seen = []

    @contextmanager
    def capture(cuda_graph, tag, *, backup, pool, stream, capture_error_mode):
        seen.append((cuda_graph, pool, stream, capture_error_mode))
        with memsaver.region(tag, backup=backup):
            yield

    monkeypatch.setattr(memsaver, "graph", capture)
    saver = MemsaverAdapter()
    with saver.cuda_graph(cuda_graph=graph, pool=pool, stream=stream, tag=name, **more):
        block = Block(sim, MIB, 1)
    assert seen == [(graph, pool, stream, "global")]
    saver.pause(name)
    saver.resume(name)
    assert block.is_intact() if more else block.is_zero()


def test_a_graph_on_the_simulator_is_a_clear_error(sim):
    with pytest.raises(NotLoadedError, match="captures a CUDA graph"):
        with MemsaverAdapter().cuda_graph(cuda_graph=object(), pool=None, stream=None):
            pass


def test_other_methods_of_sglangs_saver_interface():
    saver = MemsaverAdapter()
    assert saver.enabled is True
    assert saver.check_validity("release_memory_occupation") is None


@pytest.mark.preloads
def test_children_are_preloaded_only_if_requested(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with MemsaverAdapter().configure_subprocess():
        assert "LD_PRELOAD" not in os.environ
    monkeypatch.setenv("MEMSAVER_SGLANG_PRELOAD", "1")
    with MemsaverAdapter().configure_subprocess():
        assert "libmemsaver_preload.so" in os.environ["LD_PRELOAD"]
    assert "LD_PRELOAD" not in os.environ
