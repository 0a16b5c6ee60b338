"""Adapters between memsaver and frameworks, each importable without its framework."""
