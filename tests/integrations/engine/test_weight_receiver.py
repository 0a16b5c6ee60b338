"""Tests the process group member that receives new weights."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from memsaver.errors import InvalidStateError
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.weights.groups import Receiver, create_group

torch = pytest.importorskip("torch")


def test_a_group_whose_weights_did_not_arrive_is_left():
    store = torch.distributed.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    with ThreadPoolExecutor(1) as threads:
        sender = threads.submit(create_group, store, "g", "gloo", 0, 2, timedelta(seconds=30))
        receiver = Receiver("g", "127.0.0.1", store.port, "gloo", 1, 2, 30)
        group = sender.result()
    group.broadcast([torch.arange(3.0)], torch.distributed.BroadcastOptions())
    received = torch.zeros(3)
    receiver.receive([received], 30)
    assert received.tolist() == [0, 1, 2]
    with pytest.raises(EngineError, match="did not arrive"):
        receiver.receive([received], 0.1)
    for _ in range(2):
        with pytest.raises(InvalidStateError, match="join it again"):
            receiver.receive([received], 30)
    receiver.close()
