"""Measure with mutants how many wrong lines of code the tests detect (`make mutation`)."""
