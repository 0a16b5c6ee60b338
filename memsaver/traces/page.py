"""Write a trace as a self-contained page with an interactive chart."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from memsaver.traces.series import device_series
from memsaver.traces.trace import Trace

__all__ = ["to_html"]

_ASSETS = Path(__file__).parent / "assets"


def to_html(trace: Trace) -> str:
    """Return the text of the page."""
    # In a script element, "<" could begin the end tag or a comment.
    data = json.dumps(_data(trace), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "LICENSE": html.escape(_asset("uPlot.LICENSE")),
        "STYLE": _asset("uPlot.min.css") + _asset("timeline.css"),
        "DATA": data,
        "LIBRARY": _asset("uPlot.iife.min.js"),
        "SCRIPT": _asset("timeline.js"),
    }
    page, rest = "", _asset("timeline.html")
    for name, text in parts.items():  # in page order, so that no inserted text is searched
        before, _, rest = rest.partition(f"@{name}@")
        page += before + text
    return page + rest


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _data(trace: Trace) -> dict[str, Any]:
    return {
        "started": trace.started,
        "begin": trace.begin,
        "seconds": trace.seconds,
        "process": trace.process,
        "dropped": trace.dropped,
        "tags": list(trace.tags),
        "devices": [_device(trace, device) for device in trace.devices],
        "transitions": [
            {
                "number": row.number,
                "kind": row.kind,
                "direction": row.direction,
                "tag": row.tag,
                "device": row.device,
                "begin": row.begin_seconds,
                "end": row.end_seconds,
                "outcome": row.outcome,
                "bytes": row.device_bytes,
                "copied": row.copied_bytes,
                "caller": row.caller,
            }
            for row in trace.transitions
        ],
    }


def _device(trace: Trace, device: int) -> dict[str, Any]:
    series = device_series(trace, device)
    return {
        "device": device,
        "total": series.total_bytes,
        "seconds": series.seconds,
        "resident": series.resident,
        "allocated": series.allocated,
        "free": series.free,
    }
