"""Tests calls that run between any two lines of a send, a receipt, or an expiry.

Another thread, or a finalizer on the same thread, makes these calls. No call must wait for the
interrupted call. A finalizer that interrupts a call might wait for the tag of the thread that makes
the other call.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import time

import pytest
from importing_process import allocations

import memsaver
from memsaver._memory.sharing import exporter, sending, sent_storages
from memsaver.errors import SharingError

pytest.importorskip("torch")
pytestmark = pytest.mark.each_python

FILES = {module.__file__ for module in (exporter, sending, sent_storages)}
WAIT = 20.0


def made_elsewhere(call):
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(WAIT)
    assert not caller.is_alive(), "a call waits for the one that it interrupted"


def interrupted_at(place, call, other):
    """Call `call`; call `other` before `call` executes its line number `place`.

    Return whether `call` executed at least `place` lines.
    """
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            seen += 1
            if seen == place:
                other()
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return seen >= place


class Sender:
    """A tensor to which only this object refers, with the tokens of its messages in transit."""

    def __init__(self, tensor, name):
        self.tensor, self.name = tensor, name
        self.tokens = []
        self.is_freed = True  # whether taking the last message freed its memory at once
        self.may_be_late = False  # whether the receiver of an expired message may still take it

    def steps(self, names):
        return lambda: [getattr(self, name)() for name in names]

    def send(self):
        self.tokens.append(sending.reduce(self.tensor, self.name)[1][-1][1])

    def take(self):
        sent_storages.cancel(self.tokens[-1:])
        del self.tokens[-1:]

    def take_last(self):
        """Receive the only message of a deleted tensor."""
        self.tensor = None
        self.take()
        self.is_freed = allocations(self.name) == 0

    def look(self):
        sent_storages.forget_expired()

    def count(self):
        sending.kept()

    def fail(self):
        """Begin to answer the receiver, then fail."""
        sent, _ = sent_storages.find(self.tokens[-1])
        sent_storages.unclaim(sent, sent_storages.claim(sent))

    def send_briefly(self):
        memsaver.configure(importer_seconds=1)
        self.send()
        self.tokens.pop()
        self.may_be_late = True
        memsaver.configure(importer_seconds=10)

    def expire(self):
        sent_storages.forget_expired(time.monotonic() + 5)

    def find(self):
        sent_storages.find(self.tokens[0])

    def prune(self):
        sent_storages._most_sent = 1
        sent_storages._prune()

    def forget(self):
        sent_storages._forget_received()

    def check(self):
        """Check that the memory is kept exactly as long as messages are in transit."""
        self.tensor = None
        self.expire()
        for token in self.tokens:
            assert sent_storages.find(token)[1].nbytes() == 200
            sent_storages.cancel([token])
        if self.may_be_late:
            sent_storages.forget_expired(math.inf)
        assert self.is_freed and sending.kept() == allocations(self.name) == 0
        for token in self.tokens:
            with pytest.raises(SharingError, match="was freed"):
                sent_storages.find(token)
        self.prune()
        assert len(sent_storages._sent) == len(sent_storages._sent_of) == 0


@pytest.mark.parametrize("makes", [made_elsewhere, lambda call: call()], ids=["thread", "reentry"])
@pytest.mark.parametrize(
    ("before", "call", "other"),
    [
        (["send"], "take", ["send"]),
        (["send", "send"], "take", ["take"]),
        (["send"], "take", ["send_briefly", "expire"]),
        (["send"], "fail", ["send"]),
        (["send_briefly"], "expire", ["send"]),
        (["send", "send_briefly"], "expire", ["take"]),
        (["send_briefly"], "expire", ["expire", "prune"]),
        ([], "send", ["send", "expire", "prune"]),
        (["send"], "send", ["take"]),
        (["send_briefly"], "send", ["expire"]),
        (["send"], "look", ["take_last"]),
        (["send"], "count", ["take_last"]),
        (["send"], "find", ["send", "expire", "prune"]),
        (["send"], "prune", ["send", "expire", "prune"]),
        (["send"], "forget", ["send", "take"]),
    ],
)
def test_memory_is_kept_for_each_message(
    make, name, options, in_thread, monkeypatch, before, call, other, makes
):
    options(importer_seconds=10)
    monkeypatch.setattr(sent_storages, "_most_sent", 1)

    def interrupt_each_line():
        for place in itertools.count(1):
            sender = Sender(make(50), name)
            sender.steps(before)()
            has_line = interrupted_at(
                place, getattr(sender, call), functools.partial(makes, sender.steps(other))
            )
            sender.check()
            if not has_line:
                return place
        raise AssertionError

    assert in_thread(interrupt_each_line).result() > 3


def test_a_late_receiver_takes_no_later_message(make, name, options):
    options(importer_seconds=10)
    sender = Sender(make(50), name)
    sender.send_briefly()
    sender.send()
    sender.expire()
    sent_storages.cancel(sender.tokens[:1])
    sender.check()


def test_a_receiver_whose_answer_failed_takes_its_own_message(make, name, options):
    options(importer_seconds=10)
    sender = Sender(make(50), name)
    sender.send()
    sender.send()
    first = sent_storages.claim(sent := sent_storages.find(sender.tokens[0])[0])
    sent_storages.unclaim(sent, first)
    assert sent_storages.claim(sent) == first
    sent_storages.unclaim(sent, first)
    sender.check()


def test_a_receiver_whose_answer_fails_late_takes_no_later_message(make, name, options):
    options(importer_seconds=10)
    sender = Sender(make(50), name)
    sender.send_briefly()
    late = sent_storages.claim(sent := next(iter(sent_storages._sent.values())))
    sender.send()
    sender.expire()
    sent_storages.unclaim(sent, late)
    assert sent_storages.claim(sent) == late
    sender.check()


def test_messages_that_expired_are_not_awaited(make, name, options):
    options(importer_seconds=10)
    sender = Sender(make(50), name)
    for _ in range(3):
        sender.send_briefly()
    sender.expire()
    sender.send()
    sender.may_be_late = False
    sender.check()
