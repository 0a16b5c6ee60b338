"""A picture of a machine's figures. Importing this module imports matplotlib (extra `plot`)."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

import memsaver
from memsaver._runtime.text import size_text
from memsaver.cli.measurements.figures import Figure
from memsaver.cli.measurements.machine import Measured
from memsaver.cli.sizes import gibibytes

__all__ = ["draw_picture"]

_OURS, _LIMIT = "#2a6fbb", "#b0b7c0"
_BAR = 0.36  # the height of a bar, as a fraction of the distance between two figures


def draw_picture(measured: Measured, kind: str) -> bytes:
    """Draw each pause and resume next to its limit, in milliseconds, with one panel for each group.

    Returns the bytes of an image file. `kind` is "png", "svg" or "pdf".
    """
    groups: dict[str, list[Figure]] = {}
    for figure in measured.figures:
        if figure.limit_seconds is not None:
            groups.setdefault(figure.group, []).append(figure)
    heights = [len(figures) for figures in groups.values()]
    picture = Picture(figsize=(9, 1.6 + 0.75 * sum(heights)), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(len(groups), 1, squeeze=False, height_ratios=heights)
    for panel, (group, figures) in zip(panels[:, 0], groups.items(), strict=True):
        _draw_panel(panel, group, figures)
    panels[0, 0].legend(loc="upper right", bbox_to_anchor=(1, 1.3), ncols=2, frameon=False)
    says = f"memsaver {memsaver.__version__} on {measured.name}"
    if measured.simulated:
        says += " (simulated: the times are meaningless)"
    picture.suptitle(says, x=0.01, ha="left", fontweight="bold")
    panels[-1, 0].set_xlabel(f"milliseconds, medians of {measured.rounds}")
    content = io.BytesIO()
    picture.savefig(content, format=kind, dpi=150)
    return content.getvalue()


def _draw_panel(panel: Any, group: str, figures: list[Figure]) -> None:
    ours = [1e3 * figure.median_seconds for figure in figures]
    limits = [1e3 * (figure.limit_seconds or 0) for figure in figures]
    places = list(range(len(figures)))
    upper = panel.barh([at - _BAR / 2 for at in places], ours, _BAR, color=_OURS, label="memsaver")
    lower = panel.barh([at + _BAR / 2 for at in places], limits, _BAR, color=_LIMIT, label="limit")
    rates = [gibibytes(figure.bytes_per_second) for figure in figures]
    texts = [f"{ms:,.1f} ms, {rate} GiB/s" for ms, rate in zip(ours, rates, strict=True)]
    panel.bar_label(upper, texts, padding=3)
    named = [f"{ms:,.1f} ms, {figure.limit}" for ms, figure in zip(limits, figures, strict=True)]
    panel.bar_label(lower, named, padding=3, color="#59636e")
    panel.set_yticks(places, [figure.title for figure in figures])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.35 * max([*ours, *limits]))
    panel.set_title(f"{group}, {size_text(figures[0].bytes)}", loc="left", fontsize="medium")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x", color="#e5e8ec")
    panel.set_axisbelow(True)
