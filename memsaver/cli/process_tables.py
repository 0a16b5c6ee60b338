"""The tables of processes in the output of `memsaver top`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memsaver._runtime.text import plain_text, size_text
from memsaver.cli.tables import (
    Groups,
    add_columns,
    folded,
    groups_for,
    is_narrow,
    simple_box,
)
from memsaver.cli.units import format_rate, format_seconds
from memsaver.cli.watched import Found, Process, Silent, WatchedTag

if TYPE_CHECKING:  # imported here, because rich is slow to import
    from rich.console import Console, RenderableType
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

__all__ = ["HOW_TO_BE_SEEN", "NOBODY", "view"]

NOBODY = "No process of this user that is visible here uses memsaver."
HOW_TO_BE_SEEN = (
    "A process is visible to the same user on the same machine once it has a tag (after its first "
    "memsaver.region; with `memsaver run --tag`, once it allocates device memory or queries "
    "memsaver's tags), unless its environment has MEMSAVER_TOP=0. In a container, run this command "
    "inside the container. `memsaver doctor` reports whether memsaver works here."
)

_STATES = {
    "mapped": "green",
    "paused": "yellow",
    "saving": "cyan",
    "restoring": "cyan",
}
_WIDE, _WIDER = 104, 130  # terminal columns needed for one line per row, and for the callers

# The columns of narrow tables.
_TAGS: Groups = (("Tag", "GPU, state"), ("Resident", "Paused"), ("Backup", "Last transition"))
_TOTALS: Groups = (("All tags on",), ("Resident", "Paused"), ("Device has", "Processes"))

_NOTHING = "-"


def view(found: Found, console: Console) -> RenderableType:
    """Return the tables of the processes for this console."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for process in found.processes:
        parts += [
            _name(process, console),
            _facts(process),
            _tags_table(process, console),
            Text(),
        ]
    for silent in found.silent:
        parts += [_name(silent, console), _indented(Text(silent.why, style="red")), Text()]
    if any(process.devices for process in found.processes):
        parts.append(_totals_table(found, console))
    elif not parts:
        parts += [Text(NOBODY, style="bold"), Text(HOW_TO_BE_SEEN)]
    for folder in found.refused:
        text = f"{folder} is ignored: it must belong to this user and have mode 0700"
        parts.append(Text(text, style="red"))
    return Group(*parts)


def _name(process: Process | Silent, console: Console) -> Text:
    """Return the process's id and command, truncated to the width. JSON output is not truncated."""
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    line = f"{process.pid} {process.command}"
    if cell_len(line) > console.width:
        line = set_cell_size(line, console.width - 3) + "..."
    return Text(line, style="bold")


def _facts(process: Process) -> Padding:
    from rich.text import Text

    facts = [f"memsaver {process.memsaver}"]
    if process.driver is not None:
        major, minor = divmod(process.driver.version, 1000)
        name = "simulated driver" if process.driver.simulated else process.driver.opened
        facts.append(f"{name} ({major}.{minor // 10})")
    if process.host_bytes:
        facts.append(f"{size_text(process.host_bytes)} of host memory for backups")
    return _indented(Text(", ".join(facts), style="dim"))


def _indented(text: Text) -> Padding:
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, 2), expand=False)


def _tags_table(process: Process, console: Console) -> Table:
    from rich.text import Text

    if is_narrow(console):
        return _narrow_tags_table(process, console)
    wide, wider = console.width >= _WIDE, console.width >= _WIDER
    table = _table(console)
    table.add_column("Tag", overflow="fold", min_width=8)
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("State", no_wrap=True)
    for name in ("Resident", "Paused"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Backup", no_wrap=True)
    table.add_column("Last transition", no_wrap=True)
    if wider:
        table.add_column("By", overflow="fold", ratio=1)
    between = "  " if wide else "\n"
    for tag in process.tags:
        stats = tag.stats
        cells = [
            Text(plain_text(stats.tag), style="bold"),
            Text(str(stats.device) if stats.device >= 0 else _NOTHING),
            Text(str(stats.state), style=_STATES[stats.state]),
            Text(_size(stats.resident_bytes)),
            Text(_size(tag.stats.paused_now_bytes)),
            Text((" " if wide else "\n").join(_backup(tag))),
            Text(between.join(_last_transition(tag))),
        ]
        if wider:
            cells.append(Text(_who(tag), style="dim"))
        table.add_row(*cells)
    return table


def _narrow_tags_table(process: Process, console: Console) -> Table:
    from rich.text import Text

    table = _table(console)
    add_columns(table, _TAGS, least=8, left=("Backup",))
    for tag in process.tags:
        stats = tag.stats
        device = f"GPU {stats.device}" if stats.device >= 0 else _NOTHING
        cells: dict[str, Text | str] = {
            "Tag": Text(plain_text(stats.tag), style="bold"),
            "GPU, state": Text(f"{device}, ").append(str(stats.state), style=_STATES[stats.state]),
            "Resident": _size(stats.resident_bytes),
            "Paused": _size(stats.paused_now_bytes),
            "Backup": " ".join(_backup(tag)),
            "Last transition": "\n".join(_last_transition(tag)),
        }
        table.add_row(*folded(_TAGS, cells))
    return table


def _backup(tag: WatchedTag) -> Iterator[str]:
    """Yield the place and the size of the backup, which a mapped tag keeps for its next pause."""
    stats = tag.stats
    if stats.host_bytes:
        in_memory = stats.backup in ("host", "pageable")
        yield str(stats.backup) if in_memory else "host"
        yield size_text(stats.host_bytes)
    if stats.disk_bytes:
        yield "disk"
        yield size_text(stats.disk_bytes)
    if stats.peer_bytes:
        yield "peer"
        yield size_text(stats.peer_bytes)
    if not stats.host_bytes and not stats.disk_bytes and not stats.peer_bytes:
        yield str(stats.backup)


def _last_transition(tag: WatchedTag) -> Iterator[str]:
    """Yield the kind and age of the last transition and, if it has ended, its duration and rate."""
    stats = tag.stats
    if stats.state in ("saving", "restoring"):
        yield f"{'pause' if stats.state == 'saving' else 'resume'} for {_age(tag.age)}"
    elif stats.state == "paused":
        yield f"pause {_age(tag.age)} ago"
        yield _took(stats.last_pause_seconds, stats.last_pause_rate)
    elif stats.resumes:
        yield f"resume {_age(tag.age)} ago"
        yield _took(stats.last_resume_seconds, stats.last_resume_rate)
    else:
        yield _NOTHING


def _who(tag: WatchedTag) -> str:
    """Return the caller's file, line and function, without the folders and the thread."""
    place, _, _ = (tag.caller or "").partition(", thread ")
    return place.rpartition("/")[2]


def _took(seconds: float, rate: float) -> str:
    return f"{format_seconds(seconds)} {format_rate(rate)}" if rate else format_seconds(seconds)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(nbytes: int) -> str:
    return size_text(nbytes) if nbytes else _NOTHING


def _totals_table(found: Found, console: Console) -> Table:
    """Return a table of the totals over the tags on each device. The bus id identifies a device,
    because processes number devices differently.
    """
    from rich.text import Text

    sums: dict[tuple[str, int], list[int]] = {}  # resident, paused, processes
    for process in found.processes:
        simulated = process.driver is not None and process.driver.simulated
        for device in process.devices:
            name = device.bus_id or f"GPU {device.ordinal}"
            key = (f"{name} (simulated)" if simulated else name, device.total_bytes)
            held = sums.setdefault(key, [0, 0, 0])
            mine = [tag for tag in process.tags if tag.stats.device == device.ordinal]
            held[0] += sum(tag.stats.resident_bytes for tag in mine)
            held[1] += sum(tag.stats.paused_now_bytes for tag in mine)
            held[2] += 1
    table, groups = _table(console), groups_for(console, _TOTALS)
    add_columns(table, groups, least=12)
    for (name, total), (resident, paused, processes) in sorted(sums.items()):
        cells: dict[str, Text | str] = {
            "All tags on": Text(name, style="bold"),
            "Resident": _size(resident),
            "Paused": _size(paused),
            "Device has": size_text(total),
            "Processes": str(processes),
        }
        table.add_row(*folded(groups, cells))
    return table


def _table(console: Console) -> Table:
    from rich.table import Table

    box = simple_box(console)
    return Table(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
