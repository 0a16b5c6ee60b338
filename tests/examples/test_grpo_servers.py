"""Tests the functions of examples/grpo/ray_workers.py that do not require Ray, with a fake Ray."""

from __future__ import annotations

import http.server
import sys
import threading
from unittest.mock import MagicMock

import pytest
from repository import ROOT

pytest.importorskip("httpx")
pytest.importorskip("torch")
pytest.importorskip("typer")

EXAMPLE = ROOT / "examples" / "grpo"


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    before = set(sys.modules)
    import ray_workers

    yield ray_workers
    for name in set(sys.modules) - before:
        if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_server_is_ready_when_its_health_check_succeeds(workers):
    class Handler(http.server.BaseHTTPRequestHandler):
        status = 503

        def do_GET(self):
            self.send_response(self.status if self.path == "/health" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert not workers._answers(url)
        Handler.status = 200
        assert workers._answers(url)
        server.shutdown()
    assert not workers._answers(url)


def test_the_parts_of_an_engine_share_an_address(workers):
    assert workers.parts_of_engine(1, ("host", 5)) == [{}]
    shared = {"nnodes": 2, "dist_init_addr": "host:5"}
    assert workers.parts_of_engine(2, ("host", 5)) == [
        {**shared, "node_rank": 0},
        {**shared, "node_rank": 1},
    ]
