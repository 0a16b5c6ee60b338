"""Tests an offloaded model in a shareable tag, whose weights are sent without a copy."""

import pytest
import torch
from importing_process import received

import memsaver
from memsaver._memory.sharing import peers, sending, sent_storages
from memsaver.integrations.trainer import offload


def test_the_weights_of_an_offloaded_model_are_sent(sim, tag, wait_until):
    name = tag("model")
    with memsaver.region(name, backup="host", shareable=True):
        pass
    model = torch.nn.Linear(8, 8)
    before = model.weight.detach().clone()
    handle = offload(model, tag=name)
    for _ in range(2):  # before and after a pause
        engine = received({key: value.detach() for key, value in model.state_dict().items()})
        assert torch.equal(engine["weight"], before)
        with torch.no_grad():
            model.weight += 1
        before += 1
        assert torch.equal(engine["weight"], before)  # the same memory
        del engine
        memsaver.pause(name)
        with pytest.raises(memsaver.SharingError):
            received(model.weight.detach())
        memsaver.resume(name)
    sent_storages.cancel([message.sent.token for message in sent_storages._in_flight.values()])
    wait_until(lambda: sending.kept() == 0)
    handle.close()
    del model, handle
    wait_until(lambda: not any(peer.extents for peer in peers._peers.values()))
