"""The native libraries under sanitizers: `make sanitize`."""
