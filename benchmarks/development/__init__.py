"""Tools for developers: what another commit computes and takes, and what takes time where."""
