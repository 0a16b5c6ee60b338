"""Create the development environment: `python build_support/make_venv.py .venv`.

If torch is installed for this interpreter, the environment and the tests use this installation,
because no other build might support the machine's GPU. Otherwise, the extra `test` installs the
pinned version. The file `test-extra` in the environment contains the name of the extra to install,
`test-base` or `test`.
"""

import site
import sys
import venv
from importlib.util import find_spec
from pathlib import Path


def is_foreign(target: Path) -> bool:
    """Return whether replacing this folder would destroy files that this program did not create.

    An environment that this program creates contains only pip while it is incomplete. A complete
    environment also contains the file `test-extra`. If the folder is a link, a replacement would
    destroy the environment of another source tree.
    """
    if target.is_symlink():
        return True
    if (target / "test-extra").exists() or not target.exists():
        return False
    if not (target / "pyvenv.cfg").exists():
        return any(target.iterdir())
    installed = {path.name.split("-")[0] for path in target.glob("lib/*/site-packages/*.dist-info")}
    return not installed <= {"pip", "setuptools"}


def main() -> None:
    """Create the environment, and replace an environment that this program created earlier."""
    target = Path(sys.argv[1])
    if is_foreign(target):
        sys.exit(
            f"{target} exists, and `make` did not create it. Remove it, or name another folder: "
            "`make VENV=.venv-make ...`."
        )
    if sys.version_info < (3, 10):  # noqa: UP036 - a clear message for older versions
        sys.exit(f"memsaver needs Python 3.10 or newer; {sys.executable} is {sys.version}")
    if find_spec("ensurepip") is None:
        sys.exit(
            f"{sys.executable} cannot make virtual environments: its `ensurepip` is missing.\n"
            "On Debian and Ubuntu: `apt install python3-venv`. "
            "Or name another interpreter: `make PYTHON=/path/to/python3 ...`."
        )
    has_torch = find_spec("torch") is not None
    nested = sys.prefix != sys.base_prefix
    venv.EnvBuilder(
        system_site_packages=has_torch and not nested, clear=True, symlinks=True, with_pip=True
    ).create(target)
    if has_torch and nested:
        # An environment created from another environment would use the base installation.
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        paths = "\n".join(site.getsitepackages())
        (target / "lib" / version / "site-packages" / "outer.pth").write_text(paths + "\n")
    (target / "test-extra").write_text("test-base\n" if has_torch else "test\n")


if __name__ == "__main__":
    main()
