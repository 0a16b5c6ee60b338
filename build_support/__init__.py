"""Build support for setup.py and the Makefile, which is not part of the package."""
