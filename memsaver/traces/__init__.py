"""Recorded timelines: their data, their series, and the files that store them."""
