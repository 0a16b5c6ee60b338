"""The cases of test_torch_mode.py by subject: `case_*` functions, each with a tag of its own.

They run in a child process whose CUDA context a failure may destroy; nothing else imports them.
"""
