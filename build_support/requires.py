"""Prints requirements of pyproject.toml, one a line, for `pip install -r`.

requires.py         what a build needs
requires.py EXTRA   what that extra needs, without memsaver itself
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, for which the Makefile has installed it
    import tomli as tomllib

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
extras = [project["project"]["optional-dependencies"][name] for name in sys.argv[1:]]
for requirements in extras or [project["build-system"]["requires"]]:
    print("\n".join(requirements))
