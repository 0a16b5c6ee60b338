"""The measurements of `memsaver bench`, which return figures, with one module for each kind."""

from memsaver.cli.measurements.figures import Figure
from memsaver.cli.measurements.machine import Measured, measure_machine

__all__ = ["Figure", "Measured", "measure_machine"]
