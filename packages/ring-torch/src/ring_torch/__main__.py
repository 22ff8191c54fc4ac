"""``python -m ring_torch``: see :mod:`ring_torch.tools.cli`."""

import sys

from ring_torch.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
