"""Memory of shards, by which the commonest mistakes are found at the call that makes them.

- ``records`` is the memory, on the tensors themselves; ``mistakes`` looks at calls by it.
- ``debug`` is the public context, which lets the functions ask; outside of it they are unchanged.

May import ``training``, ``context`` and what is below them.
"""
