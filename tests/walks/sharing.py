"""Tensors of shareable blocks that a walk's process both sends and receives."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler

import torch
from simulated_driver import Block

from memsaver._memory.pickling import register
from memsaver.errors import SharingError


class Shares:
    """A process's shareable tensors, which the process both sends and receives.

    Any thread can use this object, even in signal handlers and finalizers, except for `receive`.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        register(torch)
        self._sendable = [
            (block, torch.frombuffer(block.buffer.array, dtype=torch.uint8)) for block in blocks
        ]

    def send(self, rng: random.Random) -> tuple[Block, bytes] | None:
        """Return a block and a message with the block's tensor, or None if the block's tag is
        paused."""
        block, tensor = rng.choice(self._sendable)
        try:
            return block, bytes(ForkingPickler.dumps(tensor))
        except SharingError:
            return None

    def receive(self, rng: random.Random) -> tuple[torch.Tensor | None, str | None]:
        """Send a tensor and receive it; return the received tensor and a description of any error.

        A finalizer must not call this method, because the interrupted transition might have to end
        first.
        """
        sent = self.send(rng)
        if sent is None:
            return None, None
        block, message = sent
        try:
            received = pickle.loads(message)
        except SharingError as error:  # paused since it was sent, and maybe resumed
            text = str(error)
            known = "is paused" in text or "freed or replaced" in text
            return None, None if known else f"a tensor was not received: {text}"
        if bytes(received.numpy()) != block.expected():
            return received, "a received tensor has other contents"
        return received, None
