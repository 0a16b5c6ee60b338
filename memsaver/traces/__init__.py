"""Recorded timelines: their data, their summary, and the files that store them."""
