"""Communication between the ranks of a process group: messages, agreement on calls, exchanges.

Nothing here knows of attention. This package may import ``buffers`` and ``capture``. Another way to
agree is one file here.
"""
