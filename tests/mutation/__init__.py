"""Mutation tests of ring_core with mutmut: ``nox -s mutants``."""
