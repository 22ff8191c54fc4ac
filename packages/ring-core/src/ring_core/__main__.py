"""Entry point of ``python -m ring_core``: see :mod:`ring_core.tools.cli`."""

from ring_core.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
