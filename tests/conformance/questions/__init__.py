"""Questions about the behavior of a CUDA driver that its documentation does not answer: `python -m
questions`.
"""
