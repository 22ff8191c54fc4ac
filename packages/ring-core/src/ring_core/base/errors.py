"""Errors that have a name of their own."""


class UnsupportedError(ValueError):
    """The call is valid but cannot be done this way; nothing was sent or computed.

    The message names every reason at once and what would work instead.
    """


class RankMismatchError(RuntimeError):
    """Ranks of one group made different calls; nothing of the peer's data was used."""


class WrongResultError(RuntimeError):
    """A checked call's result is not that of dense attention (``RING_CHECK``).

    The message names the rank, the call, the tensor and the entry, with both values.
    """
