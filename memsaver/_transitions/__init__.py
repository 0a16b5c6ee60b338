"""Pauses, resumes and swaps: the calls, their reports, their progress and their callbacks."""
