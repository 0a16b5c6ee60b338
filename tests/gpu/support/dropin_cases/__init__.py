"""Test cases for the distribution that provides torch_memory_saver; see `dropin_child.py`."""
