"""Build support for setup.py and the Makefile; not part of the package."""
