"""Print requirements from pyproject.toml, one per line, for `pip install -r`.

requires.py         the requirements of a build
requires.py EXTRA   the requirements of that extra, without memsaver itself
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: the Makefile has installed the package
    import tomli as tomllib

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
extras = [project["project"]["optional-dependencies"][name] for name in sys.argv[1:]]
for requirements in extras or [project["build-system"]["requires"]]:
    print("\n".join(requirements))
