"""The parts of the benchmarks, with one file for each group of metrics.

Each file defines `measure`, which runs in the parent process, and the worker of its child
processes.
"""
