"""Runs the code blocks of Markdown pages and compares their output with the pages.

A ```python block runs on the simulated driver after the page's earlier blocks, in the same module.
The ```text block that follows contains the expected output. A comment before the ```python block
changes how the block runs:

    <!-- gpu -->            the block needs a GPU and torch, and runs with the GPU tests
    <!-- not run: why -->   the block is only compiled

A comment anywhere on the page sets environment variables for the process:

    <!-- environment: NAME=value ... -->
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<directive>gpu|not run: [^\n]+?) -->\n)?"
    r"^(?P<indent>[ ]*)```python\n(?P<code>.*?)^(?P=indent)```$"
    r"(?:\n(?P=indent)```text\n(?P<output>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)
_ENVIRONMENT = re.compile(r"<!-- environment: (.*?) -->")


@dataclass(frozen=True)
class Block:
    """A block of Python code.

    Attributes:
        where: the driver, either "sim" or "gpu", or "" for a block that does not run.
        line: the line of the page at which the code begins, from 1.
        code: the text of the code.
        output: the expected output, or None if the page has no output for the block.
    """

    where: str
    line: int
    code: str
    output: str | None


def blocks_of(path: Path) -> list[Block]:
    """Return a page's Python blocks, in order."""
    text = path.read_text()
    blocks = []
    for match in _BLOCK.finditer(text):
        indent = len(match["indent"])
        code, output = (
            None if part is None else "".join(line[indent:] for line in part.splitlines(True))
            for part in (match["code"], match["output"])
        )
        directive = match["directive"] or "sim"
        line = text.count("\n", 0, match.start("code")) + 1
        where = directive if directive in ("sim", "gpu") else ""
        blocks.append(Block(where, line, code or "", output))
    return blocks


def environment_of(path: Path) -> dict[str, str]:
    """Return the variables that a page sets."""
    found = _ENVIRONMENT.search(path.read_text())
    return dict(pair.split("=", 1) for pair in found[1].split()) if found else {}


def run(path: Path, where: str) -> list[str]:
    """Run a page's blocks for a driver and return their output. Each page runs once per process."""
    namespace = {"__name__": "page"}
    printed = []
    for block in blocks_of(path):
        if block.where == where:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                text = "\n" * (block.line - 1) + block.code  # so that a traceback has its line
                exec(compile(text, str(path), "exec"), namespace)
            printed.append(out.getvalue())
    return printed


def main(where: str, *paths: str) -> None:
    """Run pages, each in its own forked child; print a line of JSON for each page.

    The parent process imports slow modules once and does not use the driver. Output that libraries
    write directly to the file descriptor of stdout, as gloo does in torch 2.8, goes to stderr.
    """
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch._dynamo  # which optimizers and compiled code import
    import torch.distributed  # noqa: F401

    import memsaver.distributed  # noqa: F401

    for path in map(Path, paths):
        if os.fork():
            os.wait()
            continue
        os.environ.update(environment_of(path))
        try:
            result: dict[str, object] = {"printed": run(path, where)}
        except BaseException:
            result = {"error": traceback.format_exc()}
        print(json.dumps({"page": str(path), **result}), file=results, flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
