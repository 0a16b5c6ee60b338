"""Read and write trace files. The file name selects the format. Files are written atomically."""

from __future__ import annotations

import os
from pathlib import Path

from memsaver._runtime.whole_files import replace_file
from memsaver.errors import ConfigError
from memsaver.traces.chrome import read_json, to_json
from memsaver.traces.trace import Trace

__all__ = ["PICTURES", "load", "save"]

PICTURES = (".png", ".svg", ".pdf")


def save(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write a trace to a file, in the format that the file's extension selects. See
    `Timeline.save`.

    Raises:
        ConfigError: the extension is unknown, or the format needs matplotlib, which is not
            installed.
        OSError: the file cannot be written.
    """
    target = Path(path)
    kind = target.suffix.lower()
    if kind == ".json":
        content = to_json(trace).encode()
    elif kind == ".html":
        from memsaver.traces.page import to_html

        content = to_html(trace).encode()
    elif kind in PICTURES:
        from memsaver.traces.picture import to_picture

        content = to_picture(trace, kind[1:])
    else:
        raise ConfigError(
            f"a timeline cannot be saved as {target.name!r}: the name must end in .json, .html or "
            f"{', '.join(PICTURES)}"
        )
    replace_file(target, content)
    return target


def load(path: str | os.PathLike[str]) -> Trace:
    """Return the trace in a `.json` file.

    Raises:
        ConfigError: the file is not a memsaver trace, or is damaged.
        OSError: the file cannot be read.
    """
    return read_json(Path(path).read_bytes())
