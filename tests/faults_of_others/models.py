"""Silent faults reported of other libraries, each modelled in a few lines of numpy.

A model computes what the library computed, for all ranks of a small sequence. Its docstring says
what went wrong, and where that was reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ring_core import Layout, Mask, merge, reference

Array = npt.NDArray[np.floating[Any]]
Results = dict[str, Array]

RANKS, LENGTH, HEADS, KV_HEADS, DIM = 4, 24, 4, 2, 16


@dataclass(frozen=True)
class Example:
    """A call on all tokens, with the results of dense attention."""

    options: Mapping[str, Any]
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    arrays: dict[str, Array] = field(init=False)
    exact: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        q_heads, kv_heads = self.heads
        heads = {"q": q_heads, "k": kv_heads, "v": kv_heads, "dout": q_heads}
        arrays = {
            name: rng.standard_normal((1, LENGTH, n, DIM)).astype(np.float32).astype(np.float64)
            for name, n in heads.items()
        }
        qkv = (arrays["q"], arrays["k"], arrays["v"])
        out, lse = reference.attention(*qkv, **self.options)
        grads = reference.attention_grads(arrays["dout"], *qkv, **self.options)
        results = {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        if grads.dsinks is not None:
            results["dsinks"] = grads.dsinks
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "exact", results)

    def attend(
        self, q: slice = slice(None), k: slice = slice(None), **other: Any
    ) -> tuple[Array, Array]:
        """Return ``out`` and ``lse`` of some queries over some keys, all of them visible."""
        x = self.arrays
        return reference.attention(x["q"][:, q], x["k"][:, k], x["v"][:, k], **other)

    def grads(self, q: slice, k: slice, dout: Array | None = None, **other: Any) -> reference.Grads:
        """Return the gradients of ``attend``."""
        x = self.arrays
        dout = x["dout"][:, q] if dout is None else dout
        return reference.attention_grads(dout, x["q"][:, q], x["k"][:, k], x["v"][:, k], **other)

    def shard(self, rank: int) -> slice:
        """Return the slice of a rank's tokens in a contiguous layout."""
        size = LENGTH // RANKS
        return slice(rank * size, (rank + 1) * size)

    def over(self, rank: int, owner: int, mask: Mask) -> tuple[Array, Array]:
        """Attend from a rank's queries to another rank's keys, with a mask of global positions."""
        q, k = self.shard(rank), self.shard(owner)
        visible = mask.dense(np.arange(q.start, q.stop), np.arange(k.start, k.stop))
        return self.attend(q, k, bias=np.where(visible, 0.0, -np.inf)[None, None])

    def ring(self, part: Callable[[int, int], tuple[Array, Array]]) -> Results:
        """Return results of a ring that merges ``part(rank, owner)`` over all owners."""
        rows = []
        for rank in range(RANKS):
            out, lse = part(rank, rank)
            out = out.swapaxes(1, 2)
            for step in range(1, RANKS):
                more, more_lse = part(rank, (rank - step) % RANKS)
                out, lse = merge(out, lse, more.swapaxes(1, 2), more_lse)
            rows.append((out.swapaxes(1, 2), lse))
        outs, lses = zip(*rows, strict=True)
        return {"out": np.concatenate(outs, axis=1), "lse": np.concatenate(lses, axis=2)}


def no_communication(x: Example) -> Results:
    """Ulysses and ring were combined without their group sizes, and no rank sent anything.

    Each rank attended to its own tokens, at an impossible rate and with a smooth loss. Reported as
    NVIDIA-NeMo/Megatron-Bridge#2665.
    """
    parts = [x.attend(x.shard(rank), x.shard(rank), causal=True) for rank in range(RANKS)]
    return {"out": np.concatenate([out for out, _ in parts], axis=1)}


def kernel_upgrade_bypasses_the_ring(x: Example) -> Results:
    """A newer kernel was selected by another name than the one that the ring had replaced.

    Every rank attended to its own shard alone, with a plausible loss. Reported as
    axolotl-ai-cloud/axolotl#3928.
    """
    return no_communication(x)


def replicated_tokens_counted_twice(x: Example) -> Results:
    """Text tokens that all ranks hold were sent round the ring as if each rank's were different.

    Their softmax weight is as many times too large as there are ranks. Reported as
    sgl-project/sglang#33327.
    """
    text = slice(0, 4)

    def part(rank: int, owner: int) -> tuple[Array, Array]:
        k = x.shard(owner)
        own = np.arange(max(k.start, text.stop), k.stop)
        keys = np.concatenate([np.arange(text.stop), own])
        arrays = x.arrays
        q = arrays["q"][:, x.shard(rank)]
        return reference.attention(q, arrays["k"][:, keys], arrays["v"][:, keys])

    return x.ring(part)


def stale_keys_in_the_backward(x: Example) -> Results:
    """The backward read the keys that had arrived last, not those of its step.

    The forward is right. Reported as huggingface/diffusers#14265.
    """
    dq = np.zeros_like(x.exact["dq"])
    for rank in range(RANKS):
        stale = x.shard((rank + 1) % RANKS)
        k, v = (np.tile(x.arrays[name][:, stale], (1, RANKS, 1, 1)) for name in "kv")
        q = x.shard(rank)
        dq[:, q] = reference.attention_grads(x.arrays["dout"][:, q], x.arrays["q"][:, q], k, v).dq
    return {"dq": dq}


def layouts_that_differ(x: Example) -> Results:
    """Tokens were cut in zigzag, and attention took them for contiguous.

    The mask is right for other tokens; training diverged without an error. Reported as
    miles#885.
    """
    layout = Layout("zigzag", LENGTH, RANKS)
    order = np.concatenate([layout.positions(rank) for rank in range(RANKS)])
    qkv = (x.arrays[name][:, order] for name in "qkv")
    out, _ = reference.attention(*qkv, causal=True)
    return {"out": out[:, np.argsort(order)]}


def heads_of_another_model(x: Example) -> Results:
    """The number of heads of a process's first model was used for the second.

    Heads were dealt out as 4, 4, 4 and 0: the last rank had none. Reported as
    deepspeedai/DeepSpeed#8316 (and #8291).
    """
    out = x.exact["out"].copy()
    out[:, :, -1] = 0
    return {"out": out}


def ratio_of_heads_broken_by_padding(x: Example) -> Results:
    """Key heads were padded to a multiple of the ranks, and query heads kept their old ratio.

    Query heads meet other key heads than their own. Reported as vllm-project/vllm-omni#5716.
    """
    q, (k, v) = x.arrays["q"], (np.tile(x.arrays[name], (1, 1, 2, 1)) for name in "kv")
    out, _ = reference.attention(q, k, v, causal=True)
    return {"out": out}


def key_heads_fewer_than_ranks(x: Example) -> Results:
    """A key head that several ranks share was looked up by the rank, not by the head.

    Rank ``r`` of the heads' owners read head ``r % K``. Named, for decoding, in
    sgl-project/sglang#34355.
    """
    parts = []
    for head in range(x.heads[0]):
        k, v = (x.arrays[name][:, :, [head % x.heads[1]]] for name in "kv")
        parts.append(reference.attention(x.arrays["q"][:, :, [head]], k, v, causal=True)[0])
    return {"out": np.concatenate(parts, axis=2)}


def empty_shards(x: Example) -> Results:
    """A rank without keys handed on NaN, or a weight of one, for what it had not seen.

    Output drifts with the length until it is gibberish; reported, without a known cause, as
    vllm-project/vllm#41623, and as a fault of empty shards in vllm-project/vllm-ascend#14126.
    """
    mask = Mask(causal=True)

    def part(rank: int, owner: int) -> tuple[Array, Array]:
        out, lse = x.over(rank, owner, mask)
        return out, np.where(np.isneginf(lse), 0.0, lse)

    return x.ring(part)


def window_inverted(x: Example) -> Results:
    """Left and right of a window were exchanged on the way to the kernel.

    Reported as lm-engine#447.
    """
    left, right = x.options["window"]
    return {"out": x.attend(window=(right, left))[0]}


def window_dropped(x: Example) -> Results:
    """A layer's window did not reach attention once sequences were split.

    Reported as PrimeIntellect-ai/prime-rl#2828.
    """
    return {"out": x.attend(causal=True)[0]}


def window_of_each_block(x: Example) -> Results:
    """The window was passed to each step's kernel, which counts from the block's own start.

    Every step but the first is wrong. In zhuzilin/ring-flash-attention, whose README says that
    windows are not supported and whose code does not refuse them.
    """

    def part(rank: int, owner: int) -> tuple[Array, Array]:
        if owner > rank:
            out, lse = x.attend(x.shard(rank), x.shard(owner))
            return np.zeros_like(out), np.full_like(lse, -np.inf)
        window = (x.options["window"][0], None)
        return x.attend(x.shard(rank), x.shard(owner), causal=owner == rank, window=window)

    return x.ring(part)


def scale_dropped(x: Example) -> Results:
    """The model's own scale was lost in keyword arguments, and the default was used.

    Reported as PrimeIntellect-ai/prime-rl#2681.
    """
    return {"out": x.attend(causal=True)[0]}


def sinks_dropped(x: Example) -> Results:
    """Sinks were lost in keyword arguments.

    Reported as PrimeIntellect-ai/prime-rl#3397.
    """
    return {"out": x.attend(causal=True)[0]}


def sinks_added_every_hop(x: Example) -> Results:
    """The gradient of sinks was added in each hop, and summed over the mesh again.

    Four times too large on two devices. Found in erfanzar/ejkernel 0.0.80.3.
    """
    return {"dsinks": x.exact["dsinks"] * 4}


def mask_dropped_for_causal(x: Example) -> Results:
    """Hooks removed the attention mask of packed documents, and asked for causal attention.

    Documents see those before them. In huggingface/accelerate's hooks for context parallelism; as
    an inflated loss in axolotl-ai-cloud/axolotl#4002.
    """
    return {"out": x.attend(causal=True)[0]}


def lengths_rounded_down(x: Example) -> Results:
    """Lengths of documents were divided by the ranks, and rounded down.

    A document of 7 tokens on 2 ranks has 6. Reported as NVIDIA/TransformerEngine#1930.
    """
    lengths = np.diff(x.options["cu_seqlens"]) // 2 * 2
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    offsets[-1] = LENGTH
    return {"out": x.attend(causal=True, cu_seqlens=tuple(offsets.tolist()))[0]}


def causal_by_local_positions(x: Example) -> Results:
    """The mask of each step counted positions from the block's own start.

    A rank saw half of every other rank's keys, also of later ones. Found in erfanzar/ejkernel
    0.0.31.
    """
    return x.ring(
        lambda rank, owner: x.attend(x.shard(rank), x.shard(owner), causal=True)
    )  # fmt: skip


def lse_of_zeros(x: Example) -> Results:
    """A kernel returned zeros in place of its log-sum-exp, and steps were merged by these.

    All steps weigh the same. In feifeibear/long-context-attention (yunchang), with torch's math and
    cuDNN kernels.
    """
    mask = Mask()

    def part(rank: int, owner: int) -> tuple[Array, Array]:
        out, lse = x.over(rank, owner, mask)
        return out, np.zeros_like(lse)

    return x.ring(part)


def lse_in_base_2(x: Example) -> Results:
    """A kernel's log-sum-exp has base 2, and was merged as a natural one.

    Reported as sgl-project/sglang#33325.
    """

    def part(rank: int, owner: int) -> tuple[Array, Array]:
        out, lse = x.over(rank, owner, Mask())
        return out, lse / np.log(2)

    return x.ring(part)


def strides_ignored(x: Example) -> Results:
    """A kernel read keys that are a view as if their memory were contiguous.

    Numbers are wrong, or NaN, without an error. Said of torch's context parallelism in its own
    source, and reported as NeMo Automodel#2384.
    """
    k = np.ascontiguousarray(x.arrays["k"].swapaxes(1, 2)).reshape(x.arrays["k"].shape)
    return {"out": reference.attention(x.arrays["q"], k, x.arrays["v"], causal=True)[0]}


def dropout_drawn_anew(x: Example) -> Results:
    """The backward dropped other weights than the forward: the random state was not saved.

    Reported as zhuzilin/ring-flash-attention#36.
    """
    other = dict(x.options) | {"dropout_seed": x.options["dropout_seed"] + 1}
    grads = x.grads(slice(None), slice(None), **other)
    return {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def mask_forgotten_in_the_backward(x: Example) -> Results:
    """The backward was told neither ``causal`` nor offsets, and masked each hop by itself.

    Norms of gradients were 1.5 times too large. Found in erfanzar/ejkernel 0.0.80.3, Pallas.
    """
    dq = np.concatenate(
        [
            sum(x.grads(x.shard(r), x.shard(o), causal=True).dq for o in range(RANKS))
            for r in range(RANKS)
        ],
        axis=1,
    )
    return {"dq": dq}


@dataclass(frozen=True)
class Fault:
    """A fault, the call that shows it, and Ring's behaviour in that call.

    ``exact`` is right; ``refused`` raises before anything is sent.
    """

    model: Callable[[Example], Results]
    options: Mapping[str, Any] = field(default_factory=lambda: {"causal": True})
    ring: Literal["exact", "refused"] = "exact"
    how: str = ""  # a sentence about what Ring does
    heads: tuple[int, int] = (HEADS, KV_HEADS)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.__name__

    @property
    def words(self) -> tuple[str, str]:
        """The fault in a sentence, and its details with the source, from the model's docstring."""
        first, _, rest = (self.model.__doc__ or "").partition("\n\n")
        return " ".join(first.split()), " ".join(rest.split())


_SINKS = np.linspace(-1, 1, HEADS)

FAULTS = (
    Fault(no_communication, how="Bytes are counted, and must be the program's; rows must be right."),
    Fault(
        kernel_upgrade_bypasses_the_ring, ring="refused",
        how="A sharded batch carries a mask that no other attention can read.",
    ),
    Fault(
        replicated_tokens_counted_twice, {},
        how="Tokens are sharded, every one on one rank, and counted once.",
    ),
    Fault(stale_keys_in_the_backward, {}, how="Keys travel again, or those that arrived are saved."),
    Fault(
        layouts_that_differ,
        how="Shards and attention have one layout, which all ranks compare before they send.",
    ),
    Fault(
        heads_of_another_model, heads=(6, 2),
        how="Nothing is kept between models; each call's heads are dealt out anew, to any ranks.",
    ),
    Fault(
        ratio_of_heads_broken_by_padding,
        how="`ulysses` pads so that each K/V head of a rank keeps equally many query heads of its own.",
    ),
    Fault(
        key_heads_fewer_than_ranks, heads=(4, 2),
        how="Rings and gathers split tokens, never heads, so one key head will do.",
    ),
    Fault(empty_shards, how="A row that sees nothing has `out = 0` and `lse = -inf`, the identity."),
    Fault(
        window_inverted, {"window": (6, 0)},
        how="`window=(left, right)` is one rule over positions, for every kernel.",
    ),
    Fault(
        window_dropped, {"causal": True, "window": (5, 0)},
        how="No argument is ignored: a layer's window is compared with its mask.",
    ),
    Fault(
        window_of_each_block, {"causal": True, "window": (5, 0)},
        how="The plan cuts the window for each pair of shards.",
    ),
    Fault(scale_dropped, {"causal": True, "softmax_scale": 0.1}, how="`softmax_scale` is an argument."),
    Fault(sinks_dropped, {"causal": True, "sinks": _SINKS}, how="`sinks` are added once, at the end."),
    Fault(
        sinks_added_every_hop, {"causal": True, "sinks": _SINKS},
        how="The gradient is this rank's part, summed over ranks once.",
    ),
    Fault(
        mask_dropped_for_causal, {"causal": True, "cu_seqlens": (0, 5, 24)},
        how="Documents are part of the mask; a mask that is not understood is refused.",
    ),
    Fault(
        lengths_rounded_down, {"causal": True, "cu_seqlens": (0, 7, 24)},
        how="Documents have any length, and may cross the borders of shards.",
    ),
    Fault(causal_by_local_positions, how="Masks are rules over global positions."),
    Fault(lse_of_zeros, {}, how="Each kernel's `lse` is part of its contract, and tested."),
    Fault(lse_in_base_2, {}, how="Each kernel's `lse` is part of its contract, and tested."),
    Fault(strides_ignored, how="Views are packed before they are sent, or read by their strides."),
    Fault(
        dropout_drawn_anew, {"causal": True, "dropout_p": 0.3, "dropout_seed": 7},
        how="What drops follows from a seed and global indices alone, in both passes.",
    ),
    Fault(mask_forgotten_in_the_backward, how="Both passes run the items of one plan."),
)  # fmt: skip
