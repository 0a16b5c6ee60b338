"""The cases of test_torch_mode.py, by subject

The cases are `case_*` functions, each of which has its own tag.

The cases run in a child process, because a failure can destroy the process's CUDA context. Only
that process imports these modules.
"""
