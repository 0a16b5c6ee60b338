"""Checks of the native libraries under sanitizers: `make sanitize`."""
