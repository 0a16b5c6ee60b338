"""Tests examples/grpo/ray_workers.py with an engine on two nodes of a local Ray cluster.

The actors run no engine and train nothing. The actors record their arguments in files.
"""

import json
import os
import sys
import time

import pytest
from repository import ROOT

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("torch")

EXAMPLE = ROOT / "examples" / "grpo"
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster():
    """Connect to a local Ray cluster of two nodes, each of which declares two GPUs."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "num_gpus": 2}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    made.add_node(**node)
    sys.path.insert(0, str(EXAMPLE))
    before = set(sys.modules)
    paths = os.pathsep.join([str(EXAMPLE), *filter(None, sys.path)])
    environment = {"PYTHONPATH": paths, "MEMSAVER_DRIVER": "sim", "OMP_NUM_THREADS": "1"}
    ray.init(address=made.address, runtime_env={"env_vars": environment})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        sys.path.remove(str(EXAMPLE))
        for name in set(sys.modules) - before:
            if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.fixture
def workers(cluster, tmp_path, monkeypatch):
    """Return the example's module with fake actors.

    A part of the engine fails to start if `broken` exists.
    """
    import ray_workers

    class Trainer(ray_workers.TrainerRank):
        def run(self, settings, rank, ranks, master, urls):
            node = ray.get_runtime_context().get_node_id()
            (tmp_path / f"rank{rank}").write_text(json.dumps([node, self.gpus()]))
            return urls

    class Engine(ray_workers.EngineWorker):
        def start(self, settings, tp, gpus, part):
            number = part.get("node_rank", 0)
            node = ray.get_runtime_context().get_node_id()
            broken = tmp_path / "broken"
            if number and broken.exists():
                raise RuntimeError("no memory")
            while not number and broken.exists():  # it waits for the other part
                time.sleep(0.1)
            name = f"{tp}-{number}-{node}-{'.'.join(gpus)}"
            (tmp_path / f"part-{name}").write_text(json.dumps([node, gpus, part]))
            return f"part {number}"

    monkeypatch.setattr(ray_workers, "TrainerRank", Trainer)
    monkeypatch.setattr(ray_workers, "EngineWorker", Engine)
    monkeypatch.setattr(ray_workers, "END_SECONDS", 1)
    return ray_workers


def recorded(folder, pattern):
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def test_an_engine_on_two_machines_has_a_part_on_each(workers, tmp_path):
    from settings import Settings

    assert workers.run_on_ray(Settings(tp=4), 4, preload=False, nodes=2) == ["part 0"]
    (host, gpus, first), (other_host, other_gpus, second) = recorded(tmp_path, "part-4-*")
    assert host != other_host and len(gpus) == len(other_gpus) == 2
    assert (first.pop("node_rank"), second.pop("node_rank")) == (0, 1)
    assert first == second and first["nnodes"] == 2
    address, _, port = first["dist_init_addr"].rpartition(":")
    assert address == ray.util.get_node_ip_address() and int(port) > 0
    # A part has the GPUs of its own machine's ranks, which are adjacent.
    ranks = recorded(tmp_path, "rank*")
    assert [node for node, _ in ranks] == [host] * 2 + [other_host] * 2
    assert [gpu for _, mine in ranks for gpu in mine] == [*gpus, *other_gpus]


def test_an_engine_on_one_machine_has_no_parts(workers, tmp_path):
    from settings import Settings

    assert workers.run_on_ray(Settings(tp=2), 4, preload=False) == ["part 0"] * 2
    assert [part for _, _, part in recorded(tmp_path, "part-2-*")] == [{}, {}]


def test_a_part_that_does_not_start_ends_the_others_at_once(workers, tmp_path):
    from settings import Settings

    (tmp_path / "broken").touch()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="no memory"):
        workers.run_on_ray(Settings(tp=4), 4, preload=False, nodes=2)
    assert time.monotonic() - begun < 60 and not recorded(tmp_path, "rank*")
    # All actors have ended: their devices are free for the next engine.
    (tmp_path / "broken").unlink()
    assert workers.run_on_ray(Settings(tp=4), 4, preload=False, nodes=2) == ["part 0"]
