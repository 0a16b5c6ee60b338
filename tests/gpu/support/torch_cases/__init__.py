"""The cases of test_torch_mode.py, by subject

The cases are `case_*` functions, each of which has its own tag.

The cases run in a child process, whose CUDA context a failure can destroy. No other module imports
them.
"""
