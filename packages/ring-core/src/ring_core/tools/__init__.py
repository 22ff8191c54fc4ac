"""Command line, doctor and bench, and what those of other packages share; may import all."""
