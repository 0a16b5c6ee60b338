"""Prints the build requirements of pyproject.toml, one a line, for `pip install -r`."""

from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
print("\n".join(project["build-system"]["requires"]))
