"""The memory limits of this process's control groups.

This module only displays the limits and their files. The native library reads the same limits
itself to decide whether a backup fits.
"""

from __future__ import annotations

from memsaver.cli.checks.system import mount_path, read_system_file

__all__ = ["memory_limits"]

_UNLIMITED = 1 << 60  # without a limit, cgroup v1 reports a number near 2^63


def memory_limits() -> list[tuple[str, int]]:
    """Return the file and size of each limit on the process's groups and their ancestors."""
    limits = []
    for folder, files in _groups():
        for name in files:
            text = read_system_file(f"{folder}/{name}") or ""
            if text.isdigit() and int(text) < _UNLIMITED:
                limits.append((f"{folder}/{name}", int(text)))
    return limits


def _groups() -> list[tuple[str, tuple[str, ...]]]:
    """Return the cgroup directories, innermost first, and the names of their limit files."""
    found = []
    mounts = _mounts()
    for line in (read_system_file("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        unified = not controllers
        if not unified and "memory" not in controllers.split(","):
            continue
        files = ("memory.max", "memory.high") if unified else ("memory.limit_in_bytes",)
        seen = [(point, _below(root, group)) for root, point in mounts[unified]]
        # A container may show a path on its host that does not exist inside the container. If so,
        # only the mounted groups can be read.
        shown = [(point, inside) for point, inside in seen if inside is not None] or seen
        for point, inside in shown[:1]:
            found += [(point.rstrip("/") + level, files) for level in _levels(inside or "")]
    return list(dict.fromkeys(found))


def _below(root: str, group: str) -> str | None:
    """Return a group's path below a mount's root ("" for the root), or None if the group is
    elsewhere.
    """
    if group.startswith("/.."):  # outside the namespace
        return None
    if root == "/":
        return "" if group == "/" else group
    return group[len(root) :] if group == root or group.startswith(f"{root}/") else None


def _levels(path: str) -> list[str]:
    """Return the path and all of its ancestors, ending with "" for the mount point."""
    parts = [part for part in path.split("/") if part]
    return ["".join(f"/{part}" for part in parts[:count]) for count in range(len(parts), -1, -1)]


def _mounts() -> dict[bool, list[tuple[str, str]]]:
    """Return the roots and mount points of cgroup version 2 (True) and of version 1's memory
    controller (False).
    """
    mounts: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for line in (read_system_file("/proc/self/mountinfo") or "").splitlines():
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if not dash or len(fields) < 5 or len(kinds) < 3:
            continue
        unified = kinds[0] == "cgroup2"
        if unified or (kinds[0] == "cgroup" and "memory" in kinds[2].split(",")):
            mounts[unified].append((mount_path(fields[3]), mount_path(fields[4])))
    return mounts
