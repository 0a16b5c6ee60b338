"""One file for each group of metrics: `measure` in the parent, and the worker of its children."""
