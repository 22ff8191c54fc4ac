"""``python -m ring_jax``: see :mod:`ring_jax.tools.cli`."""

import sys

from ring_jax.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
