"""The console script that an installation of memsaver creates, for forked processes."""

from memsaver.cli import main

main()
