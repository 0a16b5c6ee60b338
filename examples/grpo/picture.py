"""Plot the reward of a run, and the memory use and the duration of each stage."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from results import Results
from tables import GIB, median_seconds, peak_bytes

_BLOCKS = {"generate": "#4e79a7", "train": "#f0a03c"}
_MOVES = "#9aa5b1"
_LEGEND = {**_BLOCKS, "pause, resume or update": _MOVES}


def save_picture(results: Results, path: Path) -> None:
    """Write the picture in the format that the file name's extension specifies."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    reward = top.subplots()
    numbers = range(len(results.steps))
    reward.plot(numbers, [s.reward for s in results.steps], color="#0f766e", label="mean reward")
    reward.plot(
        numbers, [s.right for s in results.steps], color="#c2410c", label="right answers", ls="--"
    )
    reward.set_ylim(0, 1.02)
    reward.set_xlabel("step")
    reward.grid(alpha=0.3)
    reward.legend(loc="lower right")
    memory, time = bottom.subplots(1, 2, sharey=True)
    names = list(results.stages())
    colours = [_BLOCKS.get(name, _MOVES) for name in names]
    memory.barh(names, [peak_bytes(results)[name] / GIB for name in names], color=colours)
    memory.invert_yaxis()
    if results.total_bytes < 3 * max(peak_bytes(results).values(), default=0):
        memory.axvline(results.total_bytes / GIB, color="black", lw=1, label="the device has")
        memory.legend(loc="lower right", fontsize=8)
    memory.set_title("highest peak of a device, GiB", loc="left", fontsize=10)
    time.barh(names, [1e3 * median_seconds(results)[name] for name in names], color=colours)
    time.set_title("median of a step, ms", loc="left", fontsize=10)
    time.legend(
        [Patch(color=colour) for colour in _LEGEND.values()],
        list(_LEGEND),
        loc="lower right",
        fontsize=8,
    )
    for axes in (memory, time):
        axes.grid(alpha=0.3, axis="x")
    kind = "sleeping" if results.settings["sleep"] else "without sleep"
    figure.suptitle(f"{results.ranks} x {results.device}, {kind}", fontsize=10)
    figure.savefig(path, dpi=130)
