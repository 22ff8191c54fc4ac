"""Fuzzer: random cases on every backend, by ``python tests/fuzz`` or ``nox -s fuzz``."""
