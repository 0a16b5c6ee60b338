"""Questions to a CUDA driver that its documentation leaves open: `python -m questions`."""
