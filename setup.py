"""Build the native artefacts; the project's metadata is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import __version__ as setuptools_version
from setuptools import find_packages, setup

# A build without isolation may use an older setuptools, which rejects the licence in
# pyproject.toml without saying that it is too old.
if int(setuptools_version.split(".")[0]) < 77:
    sys.exit(
        f"memsaver needs setuptools 77 or newer to be built; this environment has "
        f"{setuptools_version}. Build with isolation, or `pip install 'setuptools>=77'` first."
    )

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 front ends do not put the project on the path

from build_support.artefacts import ARTEFACTS  # noqa: E402
from build_support.native import build_native  # noqa: E402

# Every package of memsaver/, and integrations/ as memsaver.integrations.
PACKAGES = find_packages(str(ROOT), include=["memsaver", "memsaver.*"]) + [
    f"memsaver.{name}"
    for name in find_packages(str(ROOT), include=["integrations", "integrations.*"])
]

setup(
    packages=PACKAGES,
    package_dir={"memsaver.integrations": "integrations"},
    ext_modules=[artefact.extension(ROOT) for artefact in ARTEFACTS],
    cmdclass={"build_ext": build_native(ROOT, ARTEFACTS)},
)
