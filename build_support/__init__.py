"""What setup.py and the Makefile need to build; not part of the package."""
