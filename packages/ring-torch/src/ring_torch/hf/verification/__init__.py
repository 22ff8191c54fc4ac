"""Verification of a parallelized model of transformers: its batch, and its runs split and whole."""
