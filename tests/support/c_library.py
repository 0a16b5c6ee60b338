"""Test conditions that depend on the machine's C library."""

from __future__ import annotations

import platform

import pytest


def needs_a_c_library_before_2_38() -> None:
    """Skip a test for old platforms if the headers use functions that require glibc 2.38."""
    version = platform.libc_ver()[1]
    if tuple(map(int, version.split("."))) >= (2, 38):
        pytest.skip(f"built with the headers of glibc {version}, which need 2.38")
