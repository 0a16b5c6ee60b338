"""Build the library for LD_PRELOAD. The project's metadata is in pyproject.toml."""

import sys

from setuptools import Extension, setup
from setuptools import __version__ as setuptools_version

if int(setuptools_version.split(".")[0]) < 77:
    sys.exit(
        f"torch-memory-saver needs setuptools 77 or newer to be built; this environment has "
        f"{setuptools_version}. Build with isolation, or `pip install 'setuptools>=77'` first."
    )

# Frameworks look for one of these names next to the package. The libraries are identical, because
# memsaver works with every CUDA version. "abi3" means that they work with every Python version;
# they are not Python modules.
NAMES = [
    "torch_memory_saver_hook_mode_preload",
    "torch_memory_saver_hook_mode_preload_cu12",
    "torch_memory_saver_hook_mode_preload_cu13",
]

CFLAGS = ["-std=c11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"]
CFLAGS += ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]

setup(
    ext_modules=[
        Extension(
            name,
            sources=["csrc/preload.c", "csrc/tms.c"],
            depends=["csrc/tms.h"],
            libraries=["dl"],
            extra_compile_args=CFLAGS,
            extra_link_args=["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"],
            py_limited_api=True,
        )
        for name in NAMES
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
