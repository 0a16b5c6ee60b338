"""Draw a trace with matplotlib (the extra `plot`)."""

from __future__ import annotations

import io
import math
from typing import Any

from memsaver._runtime.text import size_text
from memsaver.errors import ConfigError
from memsaver.traces.series import DeviceSeries, device_series
from memsaver.traces.trace import TagTransition, Trace

__all__ = ["to_picture"]

# The colours of the transitions' bands, and the bands' names in the legend.
_COLOURS = {"out": "#c2410c", "into": "#0f766e", "swap": "#6d4fa3", "failed": "#c81e3a"}
_WORDS = {"out": "during a pause", "into": "during a resume", "swap": "during a swap"}
_WORDS |= {"failed": "one that failed"}
_BAND_ALPHA = 0.2
_FREE = "#4b5563"
_TAGS = ["#4e79a7", "#f0a03c", "#59a14f", "#d4606a", "#8f6bb0", "#3fa7a0", "#c9a227", "#b0738f"]
_TAGS += ["#7a8794", "#96704f"]
_LONGEST_LABEL = 28  # characters
_MOST_LABELS = 16  # maximum number of tags in the legend
_WIDTH, _HEIGHT = 11.0, 4.8  # inches, for each device


def to_picture(trace: Trace, kind: str) -> bytes:
    """Return the bytes of an image file. `kind` is "png", "svg" or "pdf".

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MultipleLocator
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed: "
            "`pip install 'memsaver[plot]'`, or save the timeline as .html"
        ) from None
    devices = trace.devices or (0,)
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(devices)), layout="constrained")
    axes: Any = figure.subplots(
        2 * len(devices), 1, sharex=True, squeeze=False, height_ratios=[3, 1] * len(devices)
    )[:, 0]
    axes[-1].set_xlim(trace.begin, max(trace.seconds, trace.begin + 1e-9))
    for index, device in enumerate(devices):
        series = device_series(trace, device)
        held, free = axes[2 * index], axes[2 * index + 1]
        _draw_tags(held, trace, series)
        _draw_free(free, series)
        for part, marks in ((held, 7), (free, 3)):
            _draw_transitions(part, trace, device)
            part.yaxis.set_major_locator(MultipleLocator(_step(part.get_ylim()[1], marks)))
            part.yaxis.set_major_formatter(lambda value, _: size_text(int(value)))
            part.set_axisbelow(False)
            part.grid(alpha=0.3)
        name = f"GPU {device}: " if len(devices) > 1 else ""
        held.set_title(f"{name}device memory of tags", loc="left", fontsize=11)
        free.set_title("free on the device, as reported by the driver", loc="left", fontsize=9)
    if trace.dropped:
        figure.suptitle(f"the oldest {trace.dropped} events were dropped", fontsize=9)
    axes[-1].set_xlabel("seconds")
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=140)
    return content.getvalue()


def _step(top: float, marks: int) -> float:
    """Return the interval, a power of two, between about `marks` ticks up to `top`."""
    return float(2 ** max(0, math.ceil(math.log2(max(top, 1) / marks))))


def _draw_tags(axes: Any, trace: Trace, series: DeviceSeries) -> None:
    colours = {tag: _TAGS[index % len(_TAGS)] for index, tag in enumerate(trace.tags)}
    below = [0] * len(series.seconds)
    for tag, line in series.resident.items():
        top = [low + own for low, own in zip(below, line, strict=True)]
        axes.fill_between(
            series.seconds,
            below,
            top,
            step="post",
            color=colours[tag],
            linewidth=0,
            label=_label(tag),
        )
        below = top
    axes.set_ylim(0, max([*below, 1]) * 1.06)
    shown = {_shade(row) for row in trace.transitions if row.device == series.device}
    marked = [name for name in _COLOURS if name in shown]
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            [
                *handles[:_MOST_LABELS][::-1],
                *(_band(name) for name in marked),
            ],
            [*labels[:_MOST_LABELS][::-1], *(_WORDS[name] for name in marked)],
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )


def _band(name: str) -> Any:
    """Return a legend entry that looks like the band of a transition (pale, with edges)."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    return Patch(facecolor=to_rgba(_COLOURS[name], _BAND_ALPHA), edgecolor=_COLOURS[name])


def _label(tag: str) -> str:
    """Return a tag's legend entry, shortened and without matplotlib's special characters."""
    half = _LONGEST_LABEL // 2
    short = tag if len(tag) <= _LONGEST_LABEL else f"{tag[: half - 1]}…{tag[-half:]}"
    escaped = short.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def _shade(row: TagTransition) -> str:
    if row.outcome == "failed":
        return "failed"
    return "swap" if row.kind == "swap" else row.direction


def _draw_free(axes: Any, series: DeviceSeries) -> None:
    points = zip(series.seconds, series.free, strict=True)
    known = [(at, free) for at, free in points if free is not None]
    axes.step([at for at, _ in known], [free for _, free in known], where="post", color=_FREE)
    axes.set_ylim(0, (series.total_bytes or 1) * 1.04)


def _draw_transitions(axes: Any, trace: Trace, device: int) -> None:
    """Draw a band with edges behind the memory curves, for each call."""
    times: dict[tuple[int, str], tuple[float, float]] = {}
    for row in trace.transitions:
        if row.device == device:
            begin = row.begin_seconds if row.begin_seconds is not None else trace.begin
            end = row.end_seconds if row.end_seconds is not None else trace.seconds
            first, last = times.get((row.number, _shade(row)), (begin, end))
            times[row.number, _shade(row)] = (min(first, begin), max(last, end))
    whole_height = axes.get_xaxis_transform()
    for shade, colour in _COLOURS.items():  # one artist for each colour, not for each transition
        bands = [band for (_, other), band in times.items() if other == shade]
        if not bands:
            continue
        axes.broken_barh(
            [(begin, end - begin) for begin, end in bands],
            (0, 1),
            transform=whole_height,
            color=colour,
            alpha=_BAND_ALPHA,
            linewidth=0,
            zorder=0,
        )
        edges = [at for band in bands for at in band]
        axes.vlines(edges, 0, 1, transform=whole_height, color=colour, linewidth=0.8)
