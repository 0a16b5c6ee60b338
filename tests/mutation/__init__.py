"""Measures how many mutants, which are changed lines of code, the tests detect (`make
mutation`).
"""
