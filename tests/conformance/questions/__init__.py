"""Questions about a CUDA driver that its documentation does not answer: `python -m questions`."""
