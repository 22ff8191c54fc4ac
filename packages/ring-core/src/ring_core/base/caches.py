"""Results that are kept for equal arguments, in a cache for each bucket of lengths."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import _CacheInfo, lru_cache
from typing import Protocol

MOST_KEPT = 256  # results of a bucket


class Cache[R](Protocol):
    """A function in a cache of :mod:`functools`."""

    def __call__(self, *args: Hashable, **kwargs: Hashable) -> R:
        """Return the result, from the cache where arguments were equal before."""
        ...

    def cache_info(self) -> _CacheInfo:
        """Return hits, misses, the limit and the results that are kept."""
        ...


class LengthCaches[R](dict[int, Cache[R]]):
    """Caches of a function by buckets: bucket ``n`` is of lengths up to ``2 ** n``.

    Lengths of one bucket push none of another out. A bucket is a cache of :mod:`functools`, so a
    call of it costs no more; otherwise the object is used as one, too.

    >>> caches = LengthCaches(len)
    >>> caches[(5 - 1).bit_length()]((1, 2, 3, 4, 5))
    5
    >>> caches.by_length()
    {8: (0, 1)}
    """

    def __init__(self, function: Callable[..., R]) -> None:
        super().__init__()
        self.__wrapped__ = function

    def __missing__(self, bucket: int) -> Cache[R]:
        """Make the cache of a bucket, once for all threads."""
        return self.setdefault(bucket, lru_cache(MOST_KEPT)(self.__wrapped__))

    def cache_clear(self) -> None:
        """Forget all results and counts."""
        self.clear()

    def cache_info(self) -> _CacheInfo:
        """Return hits, misses, the limit and the results that are kept, over all buckets."""
        infos = [x.cache_info() for x in self.copy().values()]
        hits, misses, _, size = (sum(x) for x in zip(*infos, strict=True)) if infos else [0] * 4
        return _CacheInfo(hits, misses, MOST_KEPT * len(infos), size)

    def by_length(self) -> dict[int, tuple[int, int]]:
        """Return hits and misses by the greatest length of each bucket, ascending."""
        infos = {1 << n: x.cache_info() for n, x in sorted(self.copy().items())}
        return {length: (x.hits, x.misses) for length, x in infos.items()}
