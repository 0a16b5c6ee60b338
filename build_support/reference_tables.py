"""Write the tables of names in docs/reference; they make the pages readable without the site.

usage: reference_tables.py     writes the tables between the markers in the pages

A page's `:::` directives contain its names. The site replaces each directive with a complete
docstring.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import memsaver

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
BEGIN, END = "<!-- names: begin -->", "<!-- names: end -->"
HEAD = ["| name | summary |", "|---|---|"]
EXPERIMENTAL = "Experimental: "  # the beginning of a paragraph of a docstring

_DIRECTIVE = re.compile(r"^::: (?P<path>[\w.]+)\n(?P<options>(?:    .*\n)*)", re.M)
_LONGEST_DEFAULT = 24  # characters; longer defaults are shown as "..."


def names_of(page: str) -> Iterator[tuple[str, Any]]:
    """Yield each name in a page's directives together with its object, in order."""
    for match in _DIRECTIVE.finditer(page + "\n"):
        found = resolve(match["path"])
        if not isinstance(found, ModuleType):
            name = match["path"].rpartition(".")[2]
            # A public module's own function, such as `memsaver.metrics.register`.
            short = match["path"].removeprefix("memsaver.")
            is_of_module = short.count(".") == 1 and name not in vars(memsaver)
            yield short if is_of_module else name, found
            continue
        members = re.search(r"^ +members: (.*)$", match["options"], re.M)
        excluded = re.findall(r'"!\^(\w+)\$"', match["options"])
        names = re.findall(r"\w+", members[1]) if members else found.__all__
        for name in names:
            if name != "false" and name not in excluded:
                yield name, getattr(found, name)


def resolve(path: str) -> Any:
    """Return the object at a dotted path. `integrations.` paths are resolved inside `memsaver`."""
    parts = (f"memsaver.{path}" if path.startswith("integrations.") else path).split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def rows_of(name: str, found: Any) -> Iterator[tuple[str, str]]:
    """Yield the call and the summary of a function, or of a class and each of its public members.

    The summary of a literal type lists its values.
    """
    if literals := get_args(found):
        yield name, "One of " + ", ".join(f'`"{literal}"`' for literal in literals)
        return
    if not inspect.isclass(found):
        yield f"{name}{signature(found)}", summary(found)
        return
    words = summary(found)
    if issubclass(found, enum.Enum):
        words += ": " + ", ".join(f"`{member}`" for member in found)
    yield f"{name}{signature(found) if is_created(found) else ''}", words
    if name.islower():  # a context manager or a decorator: its methods are called by Python
        return
    for attribute, meaning in attributes_of(found):
        yield f"{name}.{attribute}", meaning
    for method, member in members_of(found):
        if isinstance(member, property):
            yield f"{name}.{method}", summary(member)
        else:
            function = (
                member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            )
            is_bound = not isinstance(member, staticmethod)
            yield f"{name}.{method}{signature(function, skip=int(is_bound))}", summary(function)


def is_created(found: type) -> bool:
    """Return whether programs create objects of a class.

    Programs create such objects if the class documents its parameters, or if the name of the class
    is in lower case like a function name.
    """
    text = f"{inspect.getdoc(found)}{found.__init__.__doc__}"
    return found.__name__.islower() or "\nArgs:\n" in inspect.cleandoc(text)


def is_result(found: Any) -> bool:
    """Return whether programs only receive objects of a class from calls and read them."""
    kinds = (enum.Enum, Exception)
    return inspect.isclass(found) and not is_created(found) and not issubclass(found, kinds)


def attributes_of(found: type) -> list[tuple[str, str]]:
    """Return the attributes in the docstring of a class, and their meanings."""
    listed = re.search(r"^Attributes:\n((?:    .*\n|\n)+)", f"{inspect.getdoc(found)}\n", re.M)
    text = re.sub(r"\n {8,}", " ", listed[1]) if listed else ""
    rows = re.findall(r"^    (\w+): (.*)$", text, re.M)
    return [(name, meaning.rstrip(".")) for name, meaning in rows]


def members_of(found: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that memsaver's own classes define."""
    seen = set()
    for base in found.__mro__:
        if base.__module__.startswith(("memsaver", "integrations")):
            for name, member in vars(base).items():
                is_function = inspect.isfunction(member) or isinstance(
                    member, (property, classmethod, staticmethod)
                )
                if is_function and not name.startswith("_") and name not in seen:
                    seen.add(name)
                    yield name, member


def signature(found: Any, skip: int = 0) -> str:
    """Return the public parameters of a call, without their types."""
    parts = []
    everything = list(inspect.signature(found).parameters.values())[skip:]
    parameters = [one for one in everything if not one.name.startswith("_")]
    kinds = [parameter.kind for parameter in parameters]
    for index, parameter in enumerate(parameters):
        first_keyword = parameter.kind is parameter.KEYWORD_ONLY and (
            parameter.KEYWORD_ONLY not in kinds[:index]
        )
        if first_keyword and parameter.VAR_POSITIONAL not in kinds:
            parts.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = repr(parameter.default)
        if isinstance(parameter.default, enum.Enum):
            text = str(parameter.default)
        short = text if len(text) <= _LONGEST_DEFAULT and not text.startswith("<") else "..."
        default = "" if parameter.default is parameter.empty else f"={short}"
        parts.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def summary(found: Any) -> str:
    """Return the first sentence of a docstring, with a mark for an experimental name."""
    first, *rest = (inspect.getdoc(found) or "").split("\n\n")
    mark = " (*experimental*)" if any(part.startswith(EXPERIMENTAL) for part in rest) else ""
    return first_sentence(first.replace("\n", " ")) + mark


def first_sentence(paragraph: str) -> str:
    """Return the first sentence of a paragraph, as a table cell."""
    sentence = re.split(r"(?<=[.:])\s", paragraph, maxsplit=1)[0]
    return sentence.rstrip(".:").replace("|", "\\|")


def table(page: str) -> str:
    """Return the Markdown table of a page's names.

    If calls on the page return documented objects, a second table lists these objects.
    """
    calls, results = [], []
    for name, found in names_of(page):
        rows = [f"| `{call}` | {words} |" for call, words in rows_of(name, found)]
        (results if is_result(found) else calls).extend(rows)
    if not (calls and results):
        return "\n".join([*HEAD, *calls, *results])
    between = ["", "Objects that these calls return, and their attributes:", ""]
    return "\n".join([*HEAD, *calls, *between, *HEAD, *results])


def rewritten(page: str) -> str:
    """Return the text of a page with an updated table."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(page)}\n{END}{after}"


def main() -> None:
    """Write the tables."""
    for path in sorted(PAGES.glob("*.md")):
        page = path.read_text()
        if BEGIN in page:
            path.write_text(rewritten(page))


if __name__ == "__main__":
    main()
