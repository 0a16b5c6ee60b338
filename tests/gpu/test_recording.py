"""Tests a timeline of torch tensors on a real GPU, with its files and statistics."""

import pytest
from child_process import environment_without, run_code

pytestmark = pytest.mark.gpu


def run(code, folder):
    run_code(code, environment_without("MEMSAVER_"), folder, timeout=110)


def test_a_timeline_records_tensors(tmp_path):
    pytest.importorskip("torch")
    run(
        """
        import time
        import memsaver, torch
        from memsaver.traces.files import load

        GIB, NOISE = 1 << 30, 128 << 20
        torch.cuda.init()
        with memsaver.timeline(interval=0.005) as t:
            with memsaver.region("weights", backup="host"):
                weights = torch.randint(0, 100, (4 * GIB,), dtype=torch.uint8, device="cuda")
            with memsaver.region("kv_cache", backup="none"):
                kv = torch.zeros(2 * GIB, dtype=torch.uint8, device="cuda")
            before = memsaver.device_memory(0)[0]
            paused = memsaver.pause()
            between = memsaver.device_memory(0)[0]
            time.sleep(0.05)
            resumed = memsaver.resume()
            time.sleep(0.02)
            again = memsaver.pause("weights")  # nothing has changed
            memsaver.resume("weights")

        assert t.dropped == 0
        rows = [(r.kind, r.tag, r.outcome) for r in t.transitions]
        assert rows == [("pause", "weights", "done"), ("pause", "kv_cache", "done"),
                        ("resume", "weights", "done"), ("resume", "kv_cache", "done"),
                        ("pause", "weights", "done"), ("resume", "weights", "done")], rows
        assert sum(r.device_bytes for r in t.transitions[:2]) == paused.bytes >= 6 * GIB
        assert sum(r.copied_bytes for r in t.transitions[:2]) == paused.copied_bytes >= 4 * GIB
        assert all(0 < r.seconds < 20 for r in t.transitions)
        lowest = min(r.free_bytes for r in t.memory)
        assert abs(lowest - before) < NOISE, (lowest, before)
        first, last = t.transitions[0].end_seconds, t.transitions[2].begin_seconds
        while_paused = [r.free_bytes for r in t.memory if first < r.seconds < last]
        assert len(while_paused) >= 5 and all(abs(n - between) < NOISE for n in while_paused)
        assert between - before >= 6 * GIB - NOISE

        (row,) = memsaver.stats()["weights"]
        assert again.copied_bytes == row.last_saved_bytes == 0
        assert row.last_unchanged_bytes == row.unchanged_bytes >= 4 * GIB
        assert row.last_unchanged_pieces >= 4096
        assert row.last_restore_rate > 1e9, row.last_restore_rate
        assert row.failures == 0 and row.pauses == row.resumes == 2

        assert load(t.save("trace.json")) == t.trace
        assert b"kv_cache" in t.save("memory.html").read_bytes()
        """,
        tmp_path,
    )


def test_recording_keeps_a_capture_valid(tmp_path):
    pytest.importorskip("torch")
    run(
        """
        import threading, time
        import memsaver, torch

        static = torch.ones(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with memsaver.region("weights", backup="host"):
            weights = torch.ones(64 << 20, device="cuda")
        torch.cuda.synchronize()
        with memsaver.timeline(interval=0.0005) as t:
            with memsaver.graph(graph, tag="cuda_graph"):
                out = static * 2
                time.sleep(0.05)  # the driver's memory is queried in the meantime
                out = out + 1
            asked = len(t.memory)
            memsaver.pause()
            memsaver.resume()
            graph.replay()
        assert asked > 10 and float(out.sum()) == 3 * (1 << 20)
        assert bool((weights == 1).all())
        """,
        tmp_path,
    )
