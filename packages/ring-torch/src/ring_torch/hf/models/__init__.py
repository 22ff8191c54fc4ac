"""Models of transformers: which of them are exact on split sequences, and how their batches split.

Imports nothing of transformers, and in this package ``sharding`` and modules below it.
"""
