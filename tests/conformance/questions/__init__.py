"""Questions about a CUDA driver that the driver's documentation does not answer: `python -m
questions`.
"""
