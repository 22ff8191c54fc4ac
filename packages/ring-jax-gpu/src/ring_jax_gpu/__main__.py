"""``python -m ring_jax_gpu``: see :mod:`ring_jax_gpu.tune`."""

import sys

from ring_jax_gpu.tune import main

if __name__ == "__main__":
    sys.exit(main())
