"""Recorded timelines: what one holds, its summary, and the files it is written to."""
