"""Tests that a controller discards its recorded state of a server that was replaced."""

import contextlib
import json
import threading

import pytest
from http_servers import RawServer, response

from memsaver.integrations.engine.errors import EngineBusyError, EngineError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.sglang.sleep import SleepController

TAGS = ("kv_cache", "weights", "cuda_graph")


class Replaceable:
    """A server with one scheduler, whose behavior a test sets.

    Attributes:
        guarded: whether the server has memsaver's plugin.
        idle: whether the server has no request in progress.
        released: the released tags.
        forgets: whether the server accepts releases and resumes without performing them.
        posts: the paths of the received POST requests.
    """

    def __init__(self) -> None:
        self.guarded = self.idle = True
        self.released: set[str] = set()
        self.forgets = False
        self.posts: list[str] = []
        self._lock = threading.Lock()
        self._server = RawServer(self._answer)
        self.url, self.close = self._server.url, self._server.close

    def _answer(self, connection) -> None:
        with self._lock:
            head, _, body = self._server.requests[-1].partition(b"\r\n\r\n")
            method, path = head.decode().split(" ")[:2]
            connection.sendall(self._info() if method == "GET" else self._post(path, body))

    def _info(self) -> bytes:
        state = {"scheduler": "one", "released": sorted(self.released), "idle": self.idle}
        states = [{"memsaver": {**state, "last": None}} if self.guarded else {}]
        return response({"version": "0.5.16", "internal_states": states})

    def _post(self, path: str, body: bytes) -> bytes:
        self.posts.append(path)
        if path == "/flush_cache" and not self.idle:
            return response(b"busy", "400 Bad Request")
        if not self.forgets and path == "/release_memory_occupation":
            self.released |= set(json.loads(body)["tags"])
        if not self.forgets and path == "/resume_memory_occupation":
            self.released -= set(json.loads(body)["tags"])
        return response(None)


@pytest.fixture
def server():
    with contextlib.closing(Replaceable()) as server:
        yield server


def replace_by_a_bare_one(server) -> None:
    server.guarded, server.idle, server.released = False, False, set()
    server.posts.clear()


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_a_guarded_server_replaced_by_a_bare_one_is_neither_asleep_nor_released(server, asleep):
    controller = SleepController(server.url)
    if asleep:
        controller.sleep()
        assert controller.status is Status.ASLEEP
    replace_by_a_bare_one(server)
    for call in (
        controller.refresh,
        controller.sleep,
        lambda: controller.sleep("weights", wait_idle=True),
        lambda: controller.sleep(abort=True),
        controller.wake_up,
    ):
        with pytest.raises(EngineError, match="was replaced"):
            call()
        assert controller.status is Status.UNKNOWN
    assert server.posts == []  # it received no request
    with pytest.raises(EngineBusyError):
        SleepController(server.url).sleep()  # the engine is busy


def test_a_server_replaced_while_a_sleep_waits_is_not_released(server):
    controller = SleepController(server.url)
    server.idle = False
    real, asked = server._info, []

    def info():
        asked.append(1)
        if len(asked) > 3:
            replace_by_a_bare_one(server)
        return real()

    server._info = info
    with pytest.raises(EngineError, match="was replaced"):
        controller.sleep(wait_idle=True)
    assert server.posts == [] and controller.status is Status.UNKNOWN


def test_a_guarded_server_that_returns_is_known_again(server):
    controller = SleepController(server.url)
    replace_by_a_bare_one(server)
    with pytest.raises(EngineError):
        controller.sleep()
    server.guarded = server.idle = True
    server.released = {"kv_cache"}
    assert controller.refresh() is Status.WEIGHTS_ONLY
    assert controller.sleep().skipped == ("kv_cache",)


def test_a_bare_server_replaced_by_a_guarded_one_reports_its_state(server):
    server.guarded = False
    controller = SleepController(server.url)
    assert not controller.guarded
    server.guarded, server.released = True, set(TAGS)
    assert controller.sleep().skipped == TAGS and controller.guarded


@pytest.mark.parametrize("operation", ["release", "resume"])
def test_a_call_that_the_server_accepted_and_forgot_is_an_error(server, operation):
    controller = SleepController(server.url)
    if operation == "resume":
        controller.sleep()
    server.forgets = True
    with pytest.raises(EngineError, match="reports that it had no effect"):
        controller.sleep() if operation == "release" else controller.wake_up()
    assert controller.released == server.released
