"""Ring attention in any module, in the place of torch's ``scaled_dot_product_attention``.

- ``names`` lists the names of torch's attention, ``mode`` is where they are seen.
- ``calls`` answers one call of it with ring attention, or refuses it by name; ``callers`` finds the
  module that makes it, and what may make it again.
- ``flex`` answers ``flex_attention``; ``mods`` finds out what the functions do that it is given.
- ``modules`` puts the mode round the forward of each module; ``watch`` finds those that write
  attention out.
- ``heads`` is the forward of :class:`torch.nn.MultiheadAttention`, which calls it inside torch.
- ``replace`` is the public function, and the handle that it returns; ``verify`` its runs.

May import ``verification``, ``context`` and what is below it.
"""
