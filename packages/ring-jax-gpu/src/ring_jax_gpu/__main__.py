"""``python -m ring_jax_gpu``: see :mod:`ring_jax_gpu.tools.cli`."""

import sys

from ring_jax_gpu.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
