"""The cases of test_torch_mode.py, by subject: functions case_* of a tag that no other case uses.

They run in a child process, which may end with its CUDA context; nothing else imports them.
"""
