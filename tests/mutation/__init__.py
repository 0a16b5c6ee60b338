"""Measures how many mutants (changed lines of code) the tests detect (`make mutation`)."""
