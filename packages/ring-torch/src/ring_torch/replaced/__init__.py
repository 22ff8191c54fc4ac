"""Ring attention in any module, in the place of torch's ``scaled_dot_product_attention``.

- ``calls`` answers one call of it with ring attention, or refuses it by name.
- ``modules`` puts a mode round the forward of each module, in which such calls are answered.
- ``heads`` is the forward of :class:`torch.nn.MultiheadAttention`, which calls it inside torch.
- ``replace`` is the public function, and the handle that it returns; ``verify`` its runs.

May import ``verification``, ``context`` and what is below it.
"""
