"""Verification of the weights that an engine's ranks load, independent of the engine."""
