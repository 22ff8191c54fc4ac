"""ring_core broken in thousands of small ways, by mutmut: ``nox -s mutants``."""
