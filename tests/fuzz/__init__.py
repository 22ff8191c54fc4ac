"""Random cases of the table's kind, on every backend: ``python tests/fuzz`` or ``nox -s fuzz``."""
