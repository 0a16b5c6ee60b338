"""Tests examples/grpo/ray_workers.py on a local Ray cluster: actors, environment and servers."""

import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from repository import ROOT

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("torch")

EXAMPLE = ROOT / "examples" / "grpo"
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SERVER = """
import http.server, sys

asked = []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)  # as SGLang: its health is 503 until it has warmed up
        is_ready = asked.count("/health") >= 3
        self.send_response(503 if self.path == "/health" and not is_ready else 200)
        self.end_headers()
        words = [*sys.argv[1:], "ready" if is_ready else "not ready"]
        self.wfile.write(" ".join(words).encode())

port = int(sys.argv[sys.argv.index("--port") + 1])
host = sys.argv[sys.argv.index("--host") + 1]
http.server.HTTPServer((host, port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def workers():
    """Yield the example's module, connected to a local Ray cluster."""
    sys.path.insert(0, str(EXAMPLE))
    before = set(sys.modules)
    paths = os.pathsep.join([str(EXAMPLE), *filter(None, sys.path)])
    environment = {"PYTHONPATH": paths, "MEMSAVER_DRIVER": "sim", "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"env_vars": environment},
    )
    try:
        import ray_workers

        yield ray_workers
    finally:
        ray.shutdown()
        sys.path.remove(str(EXAMPLE))
        for name in set(sys.modules) - before:
            if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def test_preloading_reaches_an_engines_actor_and_no_other(workers):
    from memsaver._memory.preload import LIBRARY

    @ray.remote
    class Looking(workers.EngineWorker):
        def libraries(self):
            return Path("/proc/self/maps").read_text()

    preloaded = Looking.options(**workers.worker_options(True)).remote()
    plain = Looking.options(**workers.worker_options(False)).remote()
    environments = ray.get([preloaded.environment.remote(), plain.environment.remote()])
    assert LIBRARY in environments[0]["LD_PRELOAD"]
    assert LIBRARY not in environments[1].get("LD_PRELOAD", "")
    maps = ray.get([preloaded.libraries.remote(), plain.libraries.remote()])
    assert LIBRARY in maps[0] and LIBRARY not in maps[1]


def test_a_server_starts_answers_and_ends(workers, tmp_path):
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    worker = ray.remote(workers.EngineWorker).remote()
    arguments = {"tp_size": 2, "enable_memory_saver": True, "no_such_thing": False}
    url = ray.get(worker.serve.remote([str(program)], arguments, {"SOME": "THING"}))
    with urllib.request.urlopen(url, timeout=10) as response:
        said = response.read().decode()
    assert said.startswith("--tp-size 2 --enable-memory-saver --host 127.0.0.1 --port ")
    assert said.endswith(" ready") and not said.endswith("not ready")
    ray.get(worker.stop.remote())
    ray.get(worker.stop.remote())
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=10)


def test_a_server_ends_with_an_actor_that_is_killed(workers, tmp_path):
    program = tmp_path / "server.py"
    program.write_text(SERVER)

    @ray.remote
    class Known(workers.EngineWorker):
        def process(self):
            return os.getpid()

    worker = Known.remote()
    url = ray.get(worker.serve.remote([str(program)], {}, {}))
    urllib.request.urlopen(url, timeout=10).close()
    # As the kernel's OOM killer does: neither Ray nor the actor can run any more code.
    os.kill(ray.get(worker.process.remote()), signal.SIGKILL)
    deadline = time.monotonic() + 30
    with pytest.raises(OSError):
        while time.monotonic() < deadline:
            urllib.request.urlopen(url, timeout=10).close()
            time.sleep(0.1)


def test_a_server_that_does_not_start_reports_the_reason(workers, tmp_path):
    program = tmp_path / "server.py"
    program.write_text("raise SystemExit('there is no GPU')")
    worker = ray.remote(workers.EngineWorker).remote()
    with pytest.raises(ray.exceptions.RayTaskError, match="there is no GPU"):
        ray.get(worker.serve.remote([str(program)], {}, {}))


def test_ranks_that_cannot_be_shared_out_are_refused(workers):
    from settings import Settings

    with pytest.raises(ValueError, match="3 ranks"):
        workers.run_on_ray(Settings(tp=2, prompts=6), 3, preload=False)
    with pytest.raises(ValueError, match="2 ranks cannot be divided among 3 machines"):
        workers.run_on_ray(Settings(tp=2), 2, preload=False, nodes=3)
    with pytest.raises(ValueError, match="64 problems cannot be divided among 3 ranks"):
        workers.run_on_ray(Settings(tp=2), 3, preload=False)


@pytest.mark.parametrize(
    ("engine", "ranks", "missing"),
    [("sglang", 2, "2 GPUs, and Ray has 0"), ("model", 8, "8 CPUs, and Ray has 4")],
)
def test_more_ranks_than_ray_has_devices_for_are_refused_at_once(workers, engine, ranks, missing):
    from settings import Settings

    with pytest.raises(ValueError, match=missing):
        workers.run_on_ray(Settings(engine=engine), ranks, preload=False)


def test_a_run_of_two_ranks_is_the_same_with_and_without_sleep(workers):
    pytest.importorskip("transformers")
    from settings import Settings

    options = {"engine": "model", "model": "tiny", "steps": 3, "prompts": 8, "samples": 8}
    runs = [
        workers.run_on_ray(Settings(**options, sleep=sleep), 2, preload=False)
        for sleep in (True, False)
    ]
    from compare import differences

    assert runs[0].ranks == 2 and len(runs[0].steps) == 3
    assert differences(*runs) == []
