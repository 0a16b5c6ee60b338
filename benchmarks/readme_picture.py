"""Draw docs/assets/measured.svg, the picture in docs/comparison.md, from the result file.

python benchmarks/readme_picture.py           (needs matplotlib)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from readme_table import RESULTS, ROOT

PICTURE = ROOT / "docs" / "assets" / "measured.svg"
METRICS = {
    "sglang_release_weights_ms": "release new weights (16 GB)",
    "sglang_release_weights_unchanged_ms": "release weights as they were",
    "sglang_resume_weights_ms": "resume the weights",
    "sglang_release_kv_ms": "release the KV cache",
    "sglang_resume_kv_ms": "resume the KV cache",
}
_OURS, _PEERS = "#3b6fb6", "#c3c8cf"
PEER = "torch_memory_saver, default setting"


def bars(rows: Sequence[dict[str, Any]]) -> list[tuple[str, float, float, float]]:
    """Return each metric's title, memsaver's and the peer's milliseconds, and their ratio."""
    of = {row["metric"]: row for row in rows}
    return [
        (words, of[name]["memsaver"], of[name]["peer_value"], of[name]["ratio"])
        for name, words in METRICS.items()
    ]


def label(ms: float, ratio: float | None = None) -> str:
    """Return the label of a bar."""
    times = "" if ratio is None else f" · {ratio:,.0f}x" if ratio >= 10 else f" · {ratio:.1f}x"
    return f"{ms:,.0f} ms{times}"


def draw(rows: Sequence[dict[str, Any]]) -> None:
    """Write the picture."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = bars(rows)
    first = next(row for row in rows if row["metric"] in METRICS)
    settings = {"svg.fonttype": "none", "svg.hashsalt": "memsaver", "font.size": 10.5}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9.2, 3.5), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        for index, (_, ours, peers, ratio) in enumerate(shown):
            axes.barh(index - 0.19, ours, 0.34, color=_OURS)
            axes.barh(index + 0.19, peers, 0.34, color=_PEERS)
            axes.annotate(
                label(ours, ratio),
                (ours, index - 0.19),
                (4, 0),
                textcoords="offset points",
                va="center",
                weight="bold",
                color=_OURS,
            )
            axes.annotate(
                label(peers),
                (peers, index + 0.19),
                (4, 0),
                textcoords="offset points",
                va="center",
                color="#57606a",
            )
        axes.set_yticks(range(len(shown)), [words for words, *_ in shown])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(peers for _, _, peers, _ in shown))
        axes.xaxis.set_visible(False)
        axes.tick_params(left=False)
        axes.spines[:].set_visible(False)
        axes.legend(
            [Patch(color=_OURS), Patch(color=_PEERS)],
            ["memsaver", PEER],
            loc="lower right",
            frameon=False,
        )
        versions = first["versions"]
        figure.suptitle(
            f"SGLang {versions['sglang']}, 8B model, one {first['gpu']}: "
            f"memsaver against torch_memory_saver {versions['torch_memory_saver']}",
            x=0.01,
            ha="left",
            fontsize=11.5,
        )
        PICTURE.parent.mkdir(exist_ok=True)
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(RESULTS.read_text()))
