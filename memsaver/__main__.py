"""Run the command line: `python -m memsaver`."""

from memsaver.cli import main

if __name__ == "__main__":
    main()
