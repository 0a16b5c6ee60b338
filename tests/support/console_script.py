"""The script that installing memsaver creates, for processes that are forked (CommandPopen)."""

from memsaver.cli import main

main()
