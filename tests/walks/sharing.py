"""Tensors of shareable blocks that a walk's process sends, and receives itself."""

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
    """A process's shareable tensors, which it sends and receives itself.

    Any thread may use it, even in signal handlers and finalizers, except for `receive`.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        register(torch)
        self._sendable = [
            (block, torch.frombuffer(block.buffer.array, dtype=torch.uint8)) for block in blocks
        ]

    def send(self, rng: random.Random) -> tuple[Block, bytes] | None:
        """Return a block and a message with its tensor; None if its tag is paused."""
        block, tensor = rng.choice(self._sendable)
        try:
            return block, bytes(ForkingPickler.dumps(tensor))
        except SharingError:
            return None

    def receive(self, rng: random.Random) -> tuple[torch.Tensor | None, str | None]:
        """Send a tensor and receive it; return it, and a description of what is wrong, if anything.

        A finalizer must not call this: the transition that it interrupts may have to end first.
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
