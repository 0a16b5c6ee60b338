"""Runs one case of `dropin_cases`: `python dropin_child.py case_cycles SETTING`."""

import sys

from dropin_cases import regions, whole_process
from torch_memory_saver import torch_memory_saver as saver

if __name__ == "__main__":
    if sys.argv[2:] == ["torch"]:
        saver.hook_mode = "torch"
    {**vars(regions), **vars(whole_process)}[sys.argv[1]]()
