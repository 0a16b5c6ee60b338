"""Draws mutants: lines of code, each changed once by one of universalmutator's rules."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

RULES = {
    ".py": ["universal.rules", "python.rules"],
    ".cpp": ["universal.rules", "c_like.rules", "cpp.rules"],
}
RULES[".h"] = RULES[".cpp"]
GROUPS = {
    "core": (["csrc/core"], (".cpp", ".h")),
    "python": (["memsaver", "integrations"], (".py",)),
}
# Lines of C++ that declare or name things, and do nothing.
INERT = re.compile(r"\s*(#|namespace\b|using\b|template\b|extern\b|public:|private:)")
# Words that a change may introduce; others result from changes within a name, which break the name.
KNOWN_WORDS = {"not", "and", "or", "pass", "break", "continue", "None", "True", "False", "return"}
KNOWN_WORDS |= {"if", "begin", "end", "min", "max", "any_of", "all_of", "none_of"}
LEAVES = re.compile(r"\s*(return|throw|continue|break)\b")  # code on the next line never runs
CPP_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True)
class Mutant:
    """A changed line of a file; lines are counted from 1."""

    file: str
    line: int
    before: str
    after: str

    def applied(self, text: str) -> str:
        """Return the text of the file with the change."""
        lines = text.splitlines(keepends=True)
        lines[self.line - 1] = self.after
        return "".join(lines)


class _WithoutTexts(ast.NodeTransformer):
    """Blank strings, annotations and imports, whose mutants say little about the tests."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant("")
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> ast.AST:
        return ast.Pass()

    visit_ImportFrom = visit_Import


@functools.lru_cache(maxsize=4)
def code_of(file: str, text: str) -> object:
    """Return the code without comments and strings, for comparison, or None if the code is
    invalid.
    """
    if not file.endswith(".py"):
        return "".join(_without_cpp_texts(text).split())
    try:
        compile(text, file, "exec")  # rejects more than the parser does
        tree = ast.fix_missing_locations(_WithoutTexts().visit(ast.parse(text)))
        return _instructions(compile(tree, file, "exec"))
    except (SyntaxError, ValueError):
        return None


def _instructions(code: CodeType) -> tuple[object, ...]:
    """Return the instructions of a code object, without line numbers and unreachable code."""
    constants = [_instructions(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, tuple(constants), code.co_names, code.co_varnames, code.co_freevars


def _without_cpp_texts(text: str) -> str:
    def blank(match: re.Match[str]) -> str:
        return '""' if match[0].startswith('"') else "\n" * match[0].count("\n") or " "

    return CPP_TEXTS.sub(blank, text)


def lines_of_code(file: str, text: str) -> list[int]:
    """Return the numbers of the lines that have an effect."""
    if file.endswith(".py"):
        nodes = list(ast.walk(ast.parse(text)))
        left_out: set[int] = set()
        for node in nodes:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
                left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        numbers = {node.lineno for node in nodes if isinstance(node, (ast.expr, ast.stmt))}
        return sorted(numbers - left_out)
    lines = _without_cpp_texts(text).splitlines()
    return [
        n for n, line in enumerate(lines, 1) if re.search(r"\w", line) and not INERT.match(line)
    ]


@functools.cache
def _changes(file: Path) -> dict[int, list[str]]:
    """Return, for each line of a file, the changed lines that the rules produce."""
    from universalmutator import mutator

    source = file.read_text().splitlines(keepends=True)
    with contextlib.redirect_stdout(io.StringIO()):
        found = mutator.mutants_regexp(source, RULES[file.suffix], ignorePatterns=[])
    changes: dict[int, list[str]] = {}
    for line, after, *_ in found:
        changes.setdefault(line, []).append(after)
    return changes


def draw(root: Path, group: str, seed: int) -> Iterator[Mutant]:
    """Yield mutants of a group, at most one per line, in a random order that `seed` determines."""
    folders, suffixes = GROUPS[group]
    files = sorted(
        str(path.relative_to(root))
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in suffixes and path.name != "setup.py"
    )
    texts = {file: (root / file).read_text() for file in files}
    places = [(file, line) for file in files for line in lines_of_code(file, texts[file])]
    chance = random.Random(f"{seed} {group}")
    chance.shuffle(places)
    for file, line in places:
        afters = list(_changes(root / file).get(line, []))
        chance.shuffle(afters)
        before = texts[file].splitlines(keepends=True)[line - 1]
        code = code_of(file, texts[file])
        for after in afters:
            mutant = Mutant(file, line, before, after)
            unreachable = LEAVES.match(before) and after.startswith(before)
            if unreachable or not breaks_no_name(mutant):
                continue
            changed = code_of(file, mutant.applied(texts[file]))
            if changed is not None and changed != code:
                yield mutant
                break


def breaks_no_name(mutant: Mutant) -> bool:
    """Return whether all names that the change introduces are names of the rules."""
    before, after = (set(re.findall(r"[^\W\d]\w*", s)) for s in (mutant.before, mutant.after))
    return after <= before | KNOWN_WORDS


def function_at(text: str, line: int) -> str:
    """Return the qualified name of the Python function whose body contains a line."""

    def search(node: ast.AST, name: str) -> str | None:
        for child in ast.iter_child_nodes(node):
            is_class = isinstance(child, ast.ClassDef)
            if is_class or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = f"{name}{child.name}"
                if child.body[0].lineno <= line <= (child.end_lineno or 0):
                    return search(child, f"{inner}." if is_class else f"{inner}.<locals>.") or inner
            found = search(child, name)
            if found:
                return found
        return None

    return search(ast.parse(text), "") or "<module>"
