"""Test backends that run a case: global numpy arrays in, global numpy arrays out."""
