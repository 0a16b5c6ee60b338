"""The interfaces of a package's modules, read from the sources without importing the modules."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Parameters:
    """A function's parameters.

    Attributes:
        positional: the names of the parameters that can be passed by position, except `self`.
        named: the names of the other parameters.
        required: the names of the parameters without a default.
        takes_all: whether the function has `*args` or `**kwargs`.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    required: frozenset[str]
    takes_all: bool

    @property
    def names(self) -> set[str]:
        return {*self.positional, *self.named}

    def difference(self, real: Parameters) -> str:
        """Describe how a fake's parameters contradict the real function's; "" if they agree."""
        unknown = self.names - real.names
        if unknown and not real.takes_all:
            return f"has no {', '.join(sorted(unknown))}"
        missing = real.required - self.names
        if missing and not self.takes_all:
            return f"requires {', '.join(sorted(missing))}"
        common = [name for name in real.positional if name in self.positional]
        if [name for name in self.positional if name in common] != common:
            return f"has the order {', '.join(common)}"
        return ""


@dataclass
class Interface:
    """The interface of a class or function.

    A function's interface has only one method: the function itself, under the name "".
    """

    methods: dict[str, Parameters] = field(default_factory=dict)
    fields: set[str] = field(default_factory=set)


class Sources:
    """The modules of a package in a folder.

    Args:
        folder: the parent of the package's folder.
        version: the version for `if` statements that use `__version__` at the top level of a
            module.
    """

    def __init__(self, folder: Path, version: str) -> None:
        self._folder, self._version = folder, version
        self._trees: dict[str, list[ast.stmt]] = {}

    def modules(self) -> list[str]:
        """Return the modules' names."""
        found = [path.relative_to(self._folder) for path in self._folder.rglob("*.py")]
        return sorted(".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in found)

    def defined(self, module: str) -> dict[str, Interface]:
        """Return the public classes and functions that a module defines."""
        names = [one.name for one in self._body(module) if isinstance(one, _DEFINITIONS)]
        return {name: self.find(module, name) for name in names if not name.startswith("_")}

    def find(self, module: str, name: str) -> Interface | None:
        """Return the class or function that a name in a module refers to, or None."""
        for statement in self._body(module):
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return self._class(module, statement)
            if isinstance(statement, _FUNCTIONS) and statement.name == name:
                return Interface({"": _parameters(statement)})
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._absolute(module, statement), alias.name)
        return None

    def _class(self, module: str, node: ast.ClassDef) -> Interface:
        made = Interface()
        for base in reversed(node.bases):
            root = base.value if isinstance(base, ast.Subscript) else base
            inherited = self.find(module, root.id) if isinstance(root, ast.Name) else None
            if inherited is not None:
                made.methods |= inherited.methods
                made.fields |= inherited.fields
        for statement in ast.walk(node):
            if isinstance(statement, ast.Attribute) and isinstance(statement.ctx, ast.Store):
                made.fields.add(statement.attr)
        for statement in node.body:
            if isinstance(statement, _FUNCTIONS):
                made.methods[statement.name] = _parameters(statement, True)
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                made.fields.add(statement.target.id)
            elif isinstance(statement, ast.Assign):
                made.fields |= {one.id for one in statement.targets if isinstance(one, ast.Name)}
        for statement in self._body(module):  # Class.method = function
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == node.name:
                made.methods[target.attr] = next(
                    _parameters(one, True)
                    for one in self._body(module)
                    if isinstance(one, _FUNCTIONS) and one.name == ast.unparse(statement.value)
                )
        return made

    def _body(self, module: str) -> list[ast.stmt]:
        if module not in self._trees:
            path = self._folder.joinpath(*module.split("."))
            paths = [one for one in (path / "__init__.py", path.with_suffix(".py")) if one.exists()]
            body = ast.parse(paths[0].read_text()).body if paths else []
            self._trees[module] = [one for part in body for one in self._chosen(part)]
        return self._trees[module]

    def _chosen(self, statement: ast.stmt) -> list[ast.stmt]:
        if not isinstance(statement, ast.If):
            return [statement]
        test = ast.unparse(statement.test)
        if "__version__" in test:
            holds = eval(test.replace("vllm.__version__", repr(self._version)), {})
            return statement.body if holds else statement.orelse
        return [*statement.body, *statement.orelse]  # TYPE_CHECKING

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        is_package = self._folder.joinpath(*module.split("."), "__init__.py").exists()
        parts = module.split(".")
        parts = parts[: len(parts) - statement.level + is_package]
        return ".".join([*parts, *filter(None, [statement.module])])


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (ast.ClassDef, *_FUNCTIONS)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method=False) -> Parameters:
    arguments = node.args
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    named = [one.arg for one in arguments.kwonlyargs]
    required += [
        name for name, value in zip(named, arguments.kw_defaults, strict=True) if value is None
    ]
    is_static = any(ast.unparse(one) == "staticmethod" for one in node.decorator_list)
    first = positional[:1] if is_method and not is_static else []
    return Parameters(
        tuple(positional[len(first) :]),
        frozenset(named),
        frozenset(required) - set(first),
        arguments.vararg is not None or arguments.kwarg is not None,
    )
