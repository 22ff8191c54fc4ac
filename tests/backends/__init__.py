"""How each backend runs a case: global numpy arrays in, global numpy arrays out."""
