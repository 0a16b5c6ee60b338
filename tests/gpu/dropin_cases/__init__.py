"""Cases of the distribution that provides torch_memory_saver; `dropin_child.py` runs one."""
