"""Errors that have a name of their own."""


class UnsupportedError(ValueError):
    """The call is valid but cannot be done this way; nothing was sent or computed.

    The message names every reason at once and what would work instead.
    """


class RankMismatchError(RuntimeError):
    """Ranks of one group made different calls; nothing of the peer's data was used."""


class WrongResultError(RuntimeError):
    """A result that was checked is wrong.

    Of a call of attention (``RING_CHECK``) it is not that of dense attention; the message names the
    rank, the call, the tensor and the entry, with both values. Of a model
    (``ring_torch.hf.verify``) it is not the whole model's; the message names the module.
    """
