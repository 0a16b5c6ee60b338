"""Recorded timelines, with their data, their series, and the files that store them."""
