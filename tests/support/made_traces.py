"""Handwritten traces for tests."""

from __future__ import annotations

from memsaver.traces.trace import TagTransition, Trace

HOSTILE = "</script><!--<script>alert('x')</script> & \"$a$ ä\u2028"


def transition(**changes):
    """Return a row of a trace; by default, a pause of one second."""
    row = dict(
        number=1,
        kind="pause",
        direction="out",
        tag="t",
        device=0,
        begin_seconds=1.0,
        end_seconds=2.0,
        outcome="done",
        device_bytes=10,
        copied_bytes=5,
        thread=7,
        caller="x.py:1 in f",
    )
    return TagTransition(**(row | changes))


def made(samples=(), memory=(), transitions=(), seconds=10.0, dropped=0, begin=0.0):
    return Trace(
        1.5e9, seconds, 42, dropped, begin, tuple(samples), tuple(memory), tuple(transitions)
    )
