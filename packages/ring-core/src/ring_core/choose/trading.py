"""The rule by which ``strategy="auto"`` trades tokens for heads instead of gathering keys."""

from __future__ import annotations

from ring_core.base.config import Request
from ring_core.plan.plan import Plan, make_plan
from ring_core.programs.gather import gather_refusals, longest_gather
from ring_core.programs.grid import ulysses_sizes
from ring_core.programs.heads import too_many_ranks
from ring_core.programs.ring import ring_program

#: Ranks trade tokens for heads where that moves at most this part of the bytes of a gather: half of
#: them, with room for padding, which a trade moves, too.
MOST_TRADED = 0.55

_MOST_SHARED_BIAS = 1 << 30  # bytes of a bias with one head for all, which every rank gathers


def trade_refusals(plan: Plan, request: Request) -> tuple[str, ...]:
    """Return why ranks cannot trade heads: too few heads, or a bias that is too large to gather."""
    reasons = []
    if reason := too_many_ranks(request.q_heads, plan.cp_size):
        most = max(ulysses_sizes(plan.cp_size, request.q_heads))
        reasons.append(
            f"{reason}; groups of {most} can: StrategyConfig('hybrid', ulysses_size={most})"
        )
    return (*reasons, *shared_bias_refusals(request, plan.cp_size))


def shared_bias_refusals(request: Request, ranks: int) -> tuple[str, ...]:
    """Return why so many ranks cannot gather a bias that all heads share, if there is one."""
    gathered = ranks * request.shared_bias_bytes
    if gathered <= _MOST_SHARED_BIAS:
        return ()
    reason = (
        f"each rank would gather a bias of {gathered / 2**30:.1f} GiB, whose one head all query "
        f"heads share, and at most {_MOST_SHARED_BIAS >> 30} GiB are gathered"
    )
    return (reason,)


def trade_automatic_refusals(plan: Plan, request: Request) -> tuple[str, ...]:
    """Return why ``auto`` does not trade heads: a gather may move fewer bytes."""
    if request.bias:
        return ("the bias would travel, too",)
    reason = untraded_reason(plan, q_heads=request.q_heads, kv_heads=request.kv_heads)
    return () if reason is None else (reason,)


def trades_heads(plan: Plan, *, q_heads: int, kv_heads: int) -> bool:
    """Return True where trading tokens for heads moves at most 55 % of the bytes of a gather.

    Ranks of one host that reach each other's memory are meant: there a gather moves most of its
    bytes beside kernels, and a trade moves all of its bytes before and after them. In units of one
    head of one token, forward, the busiest of ``P`` ranks moves

    - ``(Hq * Tq + Hk * Tk) * (P - 1) / P`` of q and k, and as many of v and out, in a trade;
    - ``Hk`` for each key that it fetches, and as many of v, in a gather: ``(P - 1) * Tk`` keys
      where it sees all, few with a window or short documents.

    So without a window it is ``0.55 * P * Hk >= Hq + Hk``. Scaling efficiency on four H200s,
    forward / forward + backward (``benchmarks/results/h200x4-strategies.json``), beside the part
    of a gather's bytes that a trade moves:

    ========================  ====  ===========  ===========
    causal                    part  gather       ulysses
    ========================  ====  ===========  ===========
    32k, 32/32                0.50  0.84 / 0.76  0.84 / 0.89
    128k, 32/32               0.50  0.97 / 0.95  0.96 / 0.97
    16k x2, 24/24 of 64       0.50  0.46 / 0.54  0.63 / 0.82
    32k, 16/16 of 192/128     0.50  0.74 / 0.69  0.81 / 0.89
    32k, 32/8                 1.25  0.96 / 0.91  0.90 / 0.92
    ========================  ====  ===========  ===========

    Heads that do not divide are padded or copied in a trade, so ranks gather then, as they do
    where the two move about as much (two ranks with as many K/V heads as query heads). They also
    gather where shards end with documents or chunks: a trade's launches over all tokens would span
    several of them, which fewer kernels can do.

    >>> from ring_core import Mask, make_plan
    >>> plan = make_plan(Mask(causal=True), seq_len=32768, cp_size=4, layout="zigzag")
    >>> trades_heads(plan, q_heads=32, kv_heads=32), trades_heads(plan, q_heads=32, kv_heads=8)
    (True, False)

    Args:
        plan: The plan.
        q_heads: Number of query heads.
        kv_heads: Number of K/V heads.
    """
    return untraded_reason(plan, q_heads=q_heads, kv_heads=kv_heads) is None


def untraded_reason(plan: Plan, *, q_heads: int, kv_heads: int) -> str | None:
    """Return why ranks gather keys, or pass them on, rather than trade tokens for heads.

    It is ``None`` if they trade (:func:`trades_heads`, which has the same arguments).
    """
    ranks, queries, keys = plan.cp_size, plan.q_layout.local_len, plan.k_layout.local_len
    if q_heads % ranks or kv_heads % ranks:
        return f"a trade would pad or copy heads: {q_heads} and {kv_heads} of K/V on {ranks} ranks"
    if refusals := gather_refusals(plan):
        return f"there is no gather that a trade could save: {'; '.join(refusals)}"
    traded = (ranks - 1) * (q_heads * queries + kv_heads * keys)  # times P
    most_fetched = (ranks - 1) * keys
    if traded > MOST_TRADED * ranks * kv_heads * most_fetched:
        # Whatever the mask hides: no plan is asked.
        return _share_text(traded, ranks * kv_heads * most_fetched, "at least ")
    fetched = longest_gather(plan).length - keys
    if traded > MOST_TRADED * ranks * kv_heads * fetched:
        return _share_text(traded, ranks * kv_heads * fetched)
    # The inner call of a trade has all tokens on one rank: its launches may span what shards end
    # with.
    of_all_tokens = make_plan(
        plan.mask, seq_len=plan.seq_len, cp_size=1, kv_seq_len=plan.kv_seq_len,
    )  # fmt: skip
    split, whole = (ring_program(x).item_counts for x in (plan, of_all_tokens))
    if split.several_documents == 0 < whole.several_documents:
        return "launches over all tokens would span several documents or chunks, and now none does"
    return None


def _share_text(traded: int, gathered: int, least: str = "") -> str:
    """Return the part of a gather's bytes that a trade moves, as a reason against the trade."""
    if gathered <= 0:
        return "ranks that gather fetch no keys here"
    return (
        f"trading heads moves {least}{-(-100 * traded // gathered)} % of the bytes of a gather, and "
        f"'auto' takes it up to {100 * MOST_TRADED:.0f} %"
    )
