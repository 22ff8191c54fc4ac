"""Communication between the ranks of a process group: messages, agreement on calls, exchanges.

May import ``buffers`` and what is below it, and knows nothing of attention. Another way to agree
is one file here.
"""
