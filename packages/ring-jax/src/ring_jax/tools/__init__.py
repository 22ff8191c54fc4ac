"""Command line tools; may import everything in this package."""
