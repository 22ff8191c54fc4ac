"""Time a ring against one rank that computes the whole sequence: ``python -m ring_torch bench``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core.tools.bench import (
    CHECK_EVERY,
    FROM_IDLE,
    PASSES,
    BenchCase,
    SparseChecks,
    Timing,
    default_case,
    sparse_checks,
    timings,
)
from ring_core.tools.doctor import Check, failed
from ring_torch.attention import ring_attention
from ring_torch.checking.settings import check as checking
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.tools.timing import seconds_of

RingChecks = Callable[..., Iterator[Check]]  # type of ``doctor.ring_checks``
PATIENCE = 600.0  # seconds after which a round is given up
CALLS = 4  # calls in a row that a round times on a GPU
CHECK_ROUNDS = 3  # rounds of 100 calls on GPUs, where they take no longer than ``seconds``


def defaults() -> BenchCase:
    """Return the setting timed by default: a ring of all GPUs, or of two processes on the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return default_case(gpus or 2, on_cpu=not gpus)


def bench(
    setting: BenchCase,
    transport: str,
    seconds: float,
    check_rounds: int | None,
    ring_checks: RingChecks,
) -> tuple[list[Check], tuple[Timing, ...], SparseChecks | None]:
    """Time a ring, and one rank alone, if the ring's results on a short sequence are right.

    The ring is timed as it is, with every call checked, and with every hundredth. A call that
    :func:`ring_attention` refuses fails the check.

    Args:
        setting: Sizes and options of the call.
        transport: Transport of the call.
        seconds: Time to spend, in seconds, besides that of ``check_rounds``.
        check_rounds: Rounds of 100 calls with ``RING_CHECK=every:100``, and as many without; 0 for
            none, ``None`` for :func:`default_rounds` on GPUs and none on a CPU, where calls are
            slow.
        ring_checks: Function that checks a ring's results, ``doctor.ring_checks``.

    Returns:
        The checks, the timings, and those of the rounds of 100 calls; no timings if a result was
        wrong. If a round of 100 calls failed, the last check says so.

    Raises:
        ValueError: There are fewer GPUs than ranks, too many ranks for one machine, or
            ``check_rounds`` is below 0.
        LocalRankError: A rank failed while single calls were timed.
    """
    cuda = torch.cuda.is_available()
    if cuda and setting.ranks > torch.cuda.device_count():
        raise ValueError(
            f"--ranks {setting.ranks}: there are {torch.cuda.device_count()} GPUs here, and a rank needs one"
        )
    if check_rounds is not None and check_rounds < 0:
        raise ValueError(f"--check-rounds must be at least 0, got {check_rounds}")
    with LocalRanks(setting.ranks, cuda=cuda, patience=PATIENCE) as ranks:
        checks = list(ring_checks(ranks, setting, transport, cuda=cuda))
        if not all(check.passed for check in checks):
            return checks, (), None
        with LocalRanks(1, cuda=cuda, patience=PATIENCE) as alone:
            alone_round, ring_round, checked_round = (
                partial(_longest_round, group, setting, transport, check)
                for group, check in ((alone, 0), (ranks, 0), (ranks, 1))
            )
            times = timings(
                alone_round, ring_round, checked_round,
                work_fraction=1 / setting.ranks, seconds=seconds,
            )  # fmt: skip
        if check_rounds is None:
            check_rounds = default_rounds(times, seconds) if cuda else 0
        if check_rounds == 0:
            return checks, times, None
        try:
            sparse = sparse_checks(
                lambda every: max(ranks.run(time_hundred, setting, transport, every)), check_rounds
            )
        except LocalRankError as error:
            name, where = f"RING_CHECK=every:{CHECK_EVERY}", f"{setting.ranks} ranks"
            return [*checks, failed(name, where, str(error))], times, None
        return checks, times, sparse


def default_rounds(times: Sequence[Timing], seconds: float) -> int:
    """Return ``CHECK_ROUNDS`` if so many rounds take at most ``seconds`` in all, otherwise 0."""
    (ring,) = (statistics.median(x.ring) for x in times if x.name == PASSES[-1])
    # As many rounds without a check, and a call before each that is not counted.
    return CHECK_ROUNDS if 2 * CHECK_ROUNDS * (CHECK_EVERY + 1) * ring <= seconds else 0


def _longest_round(
    ranks: LocalRanks, setting: BenchCase, transport: str, check: int, n: int
) -> dict[str, float]:
    """Return the seconds of a round's passes, each on the rank that is slowest in it."""
    by_rank = ranks.run(time_round, setting, transport, check, n)
    return {name: max(times[name] for times in by_rank) for name in by_rank[0]}


def time_round(
    rank: int, setting: BenchCase, transport: str, check: int, seed: int
) -> dict[str, float]:
    """Return the mean seconds of a forward, and of a forward and backward, on this rank.

    On a GPU a first call starts on an idle device, when all ranks have met. Calls in a row, as the
    layers of a model queue them, follow: there the host is quicker, and may be ahead.

    Args:
        rank: This rank.
        setting: Sizes and options of the call.
        transport: Transport of the call.
        check: Interval of the calls that are checked, as in :func:`ring_torch.check`; 0 for none.
        seed: Seed of the random inputs.
    """
    device, times, idle = _device(), dict[str, float](), dict[str, float]()
    with checking(check):
        for name, call in _calls(rank, setting, transport, seed).items():
            if device == "cuda":
                idle[name + FROM_IDLE] = _together(call, 1)
            times[name] = _together(call, CALLS if device == "cuda" else 1)
    return times | idle


def time_hundred(rank: int, setting: BenchCase, transport: str, every: int) -> float:
    """Return the seconds of 100 calls forward and backward in a row, after one that is not counted.

    Args:
        rank: This rank.
        setting: Sizes and options of the call.
        transport: Transport of the call.
        every: 100 to check one of them, 0 for none.
    """
    call = _calls(rank, setting, transport, seed=0)[PASSES[-1]]
    with checking(0):
        call()
    with checking(every):
        return _together(call, CHECK_EVERY) * CHECK_EVERY


def _device() -> str:
    """Return the type of the ranks' device."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _calls(
    rank: int, setting: BenchCase, transport: str, seed: int
) -> dict[str, Callable[[], None]]:
    """Return this rank's calls of a setting on random inputs, by their pass."""
    torch.manual_seed(1000 * seed + rank)
    length, dtype = setting.seq_len // dist.get_world_size(), getattr(torch, setting.dtype)
    q, k, v, dout = (
        torch.randn(1, length, heads, setting.head_dim, dtype=dtype, device=_device())
        for heads in (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    )
    attend = partial(
        ring_attention, layout=setting.layout, mask=setting.mask, kernel=setting.kernel, strategy=setting.strategy,
        transport=transport,
    )  # fmt: skip

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def forward_backward() -> None:
        inputs: list[Tensor] = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(attend(*inputs), inputs, dout)

    return dict(zip(PASSES, (forward, forward_backward), strict=True))


def _together(run: Callable[[], None], calls: int) -> float:
    """Return the mean seconds of calls in a row, which all ranks start at once."""
    dist.barrier()
    return seconds_of(run, calls, _device())
