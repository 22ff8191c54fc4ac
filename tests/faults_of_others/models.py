"""Silent faults reported of other libraries, each modelled in a few lines of numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from cases import Case

from ring_core import Layout, Mask, merge, reference

Array = npt.NDArray[np.floating[Any]]
Results = dict[str, Array]

RANKS, LENGTH, HEADS, KV_HEADS, DIM = 4, 24, 4, 2, 16
CAUSAL, LEFT = Mask(causal=True), 5


@dataclass(frozen=True)
class Call(Case):
    """A case, and attention of some of its tokens, as other libraries compute it."""

    def attend(
        self, q: Any = slice(None), k: Any = slice(None), **options: Any
    ) -> tuple[Array, Array]:
        """Return ``out`` and ``lse`` of some queries over some keys, all of them visible."""
        x = self.inputs
        return reference.attention(x["q"][:, q], x["k"][:, k], x["v"][:, k], **options)

    def grads(self, q: Any = slice(None), k: Any = slice(None), **options: Any) -> reference.Grads:
        """Return the gradients of ``attend``."""
        x = self.inputs
        qkv = x["q"][:, q], x["k"][:, k], x["v"][:, k]
        return reference.attention_grads(x["dout"][:, q], *qkv, **options)

    def shard(self, rank: int) -> slice:
        """Return the slice of a rank's tokens in a contiguous layout."""
        size = LENGTH // RANKS
        return slice(rank * size, (rank + 1) * size)

    def over(self, rank: int, owner: int) -> tuple[Array, Array]:
        """Attend from a rank's queries to another rank's keys, with the mask of both positions."""
        q, k = self.shard(rank), self.shard(owner)
        visible = self.mask.dense(np.arange(q.start, q.stop), np.arange(k.start, k.stop))
        return self.attend(q, k, bias=np.where(visible, 0.0, -np.inf)[None, None])

    def merged(self, part: Callable[[int, int], tuple[Array, Array]]) -> Results:
        """Return results of a ring that merges ``part(rank, owner)`` over all owners."""
        rows = []
        for rank in range(RANKS):
            out, lse = part(rank, rank)
            out = out.swapaxes(1, 2)
            for step in range(1, RANKS):
                more, more_lse = part(rank, (rank - step) % RANKS)
                out, lse = merge(out, lse, more.swapaxes(1, 2), more_lse)
            rows.append(out.swapaxes(1, 2))
        return {"out": np.concatenate(rows, axis=1)}


def no_communication(x: Call) -> Results:
    parts = [x.attend(x.shard(rank), x.shard(rank), causal=True) for rank in range(RANKS)]
    return {"out": np.concatenate([out for out, _ in parts], axis=1)}


def replicated_tokens_counted_twice(x: Call) -> Results:
    text = np.arange(4)

    def part(rank: int, owner: int) -> tuple[Array, Array]:
        k = x.shard(owner)
        own = np.arange(max(k.start, len(text)), k.stop)
        return x.attend(x.shard(rank), np.concatenate([text, own]))

    return x.merged(part)


def stale_keys_in_the_backward(x: Call) -> Results:
    parts = []
    for rank in range(RANKS):
        stale = np.arange(LENGTH)[x.shard((rank + 1) % RANKS)]
        parts.append(x.grads(x.shard(rank), np.tile(stale, RANKS)).dq)
    return {"dq": np.concatenate(parts, axis=1)}


def layouts_that_differ(x: Call) -> Results:
    layout = Layout("zigzag", LENGTH, RANKS)
    order = np.concatenate([layout.positions(rank) for rank in range(RANKS)])
    return {"out": x.attend(order, order, causal=True)[0][:, np.argsort(order)]}


def heads_of_another_model(x: Call) -> Results:
    out = x.expected["out"].copy()
    out[:, :, -1] = 0
    return {"out": out}


def ratio_of_heads_broken_by_padding(x: Call) -> Results:
    q, (k, v) = x.inputs["q"], (np.tile(x.inputs[name], (1, 1, 2, 1)) for name in "kv")
    out, _ = reference.attention(q, k, v, causal=True)
    return {"out": out}


def key_heads_fewer_than_ranks(x: Call) -> Results:
    parts = []
    for head in range(x.heads[0]):
        k, v = (x.inputs[name][:, :, [head % x.heads[1]]] for name in "kv")
        parts.append(reference.attention(x.inputs["q"][:, :, [head]], k, v, causal=True)[0])
    return {"out": np.concatenate(parts, axis=2)}


def window_inverted(x: Call) -> Results:
    window: Any = x.mask.window
    return {"out": x.attend(window=window[::-1])[0]}


def window_of_each_block(x: Call) -> Results:
    def part(rank: int, owner: int) -> tuple[Array, Array]:
        if owner > rank:
            out, lse = x.attend(x.shard(rank), x.shard(owner))
            return np.zeros_like(out), np.full_like(lse, -np.inf)
        window = (LEFT, None)
        return x.attend(x.shard(rank), x.shard(owner), causal=owner == rank, window=window)

    return x.merged(part)


def lengths_rounded_down(x: Call) -> Results:
    lengths = np.diff(np.array(x.mask.cu_seqlens)) // 2 * 2
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    offsets[-1] = LENGTH
    return {"out": x.attend(causal=True, cu_seqlens=tuple(offsets.tolist()))[0]}


def strides_ignored(x: Call) -> Results:
    k = np.ascontiguousarray(x.inputs["k"].swapaxes(1, 2)).reshape(x.inputs["k"].shape)
    return {"out": reference.attention(x.inputs["q"], k, x.inputs["v"], causal=True)[0]}


def dropout_drawn_anew(x: Call) -> Results:
    other = x.options | {"dropout_seed": (x.dropout_seed or 0) + 1}
    return {"dq": x.grads(mask=x.mask, **other).dq}


def mask_forgotten_in_the_backward(x: Call) -> Results:
    parts = [
        sum(x.grads(x.shard(rank), x.shard(owner), causal=True).dq for owner in range(RANKS))
        for rank in range(RANKS)
    ]
    return {"dq": np.concatenate(parts, axis=1)}


def options_dropped(x: Call) -> Results:
    return {"out": x.attend(causal=True)[0]}


def with_lse(change: Callable[[Array], Array]) -> Callable[[Call], Results]:
    """Return a ring that merges steps by another log-sum-exp than their own."""

    def model(x: Call) -> Results:
        def part(rank: int, owner: int) -> tuple[Array, Array]:
            out, lse = x.over(rank, owner)
            return out, change(lse)

        return x.merged(part)

    return model


@dataclass(frozen=True)
class Fault:
    """A fault, the call that shows it, and Ring's behaviour in that call.

    ``exact`` is right; ``refused`` raises before anything is sent.

    Attributes:
        name: Its name in the tests.
        model: What the library computed, for all ranks of a small sequence.
        text: The fault in a sentence, then more of it, and where it was reported.
        how: A sentence about what Ring does.
        mask: Mask of the call.
        options: Other fields of the case.
        ring: What comes of the call in Ring.
        heads: Heads of queries, and of keys.
    """

    name: str
    model: Callable[[Call], Results]
    text: str
    how: str
    mask: Mask = CAUSAL
    options: Mapping[str, Any] = field(default_factory=dict)
    ring: Literal["exact", "refused"] = "exact"
    heads: tuple[int, int] = (HEADS, KV_HEADS)

    @property
    def call(self) -> Call:
        """Return the call of Ring."""
        sizes: dict[str, Any] = {"heads": self.heads, "dims": (DIM, DIM), **self.options}
        return Call(self.name, self.mask, cp_size=RANKS, seq_len=LENGTH, **sizes)


#: What went wrong, where it was reported, and what Ring does.
FAULTS = (
    Fault("no_communication", no_communication, text="Ulysses and ring were combined without their group sizes, and no rank sent anything. Each rank attended to its own tokens, at an impossible rate and with a smooth loss. Reported as NVIDIA-NeMo/Megatron-Bridge#2665.", how="Bytes are counted, and must be the program's; rows must be right."),
    Fault("kernel_upgrade_bypasses_the_ring", no_communication, ring="refused", text="A newer kernel was selected by another name than the one that the ring had replaced. Every rank attended to its own shard alone, with a plausible loss. Reported as axolotl-ai-cloud/axolotl#3928.", how="A sharded batch carries a mask that no other attention can read."),
    Fault("replicated_tokens_counted_twice", replicated_tokens_counted_twice, mask=Mask(), text="Text tokens that all ranks hold were sent round the ring as if each rank's were different. Their softmax weight is as many times too large as there are ranks. Reported as sgl-project/sglang#33327.", how="Tokens are sharded, every one on one rank, and counted once."),
    Fault("stale_keys_in_the_backward", stale_keys_in_the_backward, mask=Mask(), text="The backward read the keys that had arrived last, not those of its step. The forward is right. Reported as huggingface/diffusers#14265.", how="Keys travel again, or those that arrived are saved."),
    Fault("layouts_that_differ", layouts_that_differ, text="Tokens were cut in zigzag, and attention took them for contiguous. The mask is right for other tokens; training diverged without an error. Reported as miles#885.", how="Shards and attention have one layout, which all ranks compare before they send."),
    Fault("heads_of_another_model", heads_of_another_model, heads=(6, 2), text="The number of heads of a process's first model was used for the second. Heads were dealt out as 4, 4, 4 and 0: the last rank had none. Reported as deepspeedai/DeepSpeed#8316 (and #8291).", how="Nothing is kept between models; each call's heads are dealt out anew, to any ranks."),
    Fault("ratio_of_heads_broken_by_padding", ratio_of_heads_broken_by_padding, text="Key heads were padded to a multiple of the ranks, and query heads kept their old ratio. Query heads meet other key heads than their own. Reported as vllm-project/vllm-omni#5716.", how="`ulysses` pads so that each K/V head of a rank keeps equally many query heads of its own."),
    Fault("key_heads_fewer_than_ranks", key_heads_fewer_than_ranks, heads=(4, 2), text="A key head that several ranks share was looked up by the rank, not by the head. Rank ``r`` of the heads' owners read head ``r % K``. Named, for decoding, in sgl-project/sglang#34355.", how="Rings and gathers split tokens, never heads, so one key head will do."),
    Fault("empty_shards", with_lse(lambda lse: np.where(np.isneginf(lse), 0.0, lse)), text="A rank without keys handed on NaN, or a weight of one, for what it had not seen. Output drifts with the length until it is gibberish; reported, without a known cause, as vllm-project/vllm#41623, and as a fault of empty shards in vllm-project/vllm-ascend#14126.", how="A row that sees nothing has `out = 0` and `lse = -inf`, the identity."),
    Fault("window_inverted", window_inverted, mask=Mask(window=(6, 0)), text="Left and right of a window were exchanged on the way to the kernel. Reported as lm-engine#447.", how="`window=(left, right)` is one rule over positions, for every kernel."),
    Fault("window_dropped", options_dropped, mask=Mask(causal=True, window=(LEFT, 0)), text="A layer's window did not reach attention once sequences were split. Reported as PrimeIntellect-ai/prime-rl#2828.", how="No argument is ignored: a layer's window is compared with its mask."),
    Fault("window_of_each_block", window_of_each_block, mask=Mask(causal=True, window=(LEFT, 0)), text="The window was passed to each step's kernel, which counts from the block's own start. Every step but the first is wrong. In zhuzilin/ring-flash-attention, whose README says that windows are not supported and whose code does not refuse them.", how="The plan cuts the window for each pair of shards."),
    Fault("scale_dropped", options_dropped, options={"softmax_scale": 0.1}, text="The model's own scale was lost in keyword arguments, and the default was used. Reported as PrimeIntellect-ai/prime-rl#2681.", how="`softmax_scale` is an argument."),
    Fault("sinks_dropped", options_dropped, options={"sinks": 0}, text="Sinks were lost in keyword arguments. Reported as PrimeIntellect-ai/prime-rl#3397.", how="`sinks` are added once, at the end."),
    Fault("sinks_added_every_hop", lambda x: {"dsinks": x.expected["dsinks"] * 4}, options={"sinks": 0}, text="The gradient of sinks was added in each hop, and summed over the mesh again. Four times too large on two devices. Found in erfanzar/ejkernel 0.0.80.3.", how="The gradient is this rank's part, summed over ranks once."),
    Fault("mask_dropped_for_causal", options_dropped, mask=Mask(causal=True, cu_seqlens=(0, 5, 24)), text="Hooks removed the attention mask of packed documents, and asked for causal attention. Documents see those before them. In huggingface/accelerate's hooks for context parallelism; as an inflated loss in axolotl-ai-cloud/axolotl#4002.", how="Documents are part of the mask; a mask that is not understood is refused."),
    Fault("lengths_rounded_down", lengths_rounded_down, mask=Mask(causal=True, cu_seqlens=(0, 7, 24)), text="Lengths of documents were divided by the ranks, and rounded down. A document of 7 tokens on 2 ranks has 6. Reported as NVIDIA/TransformerEngine#1930.", how="Documents have any length, and may cross the borders of shards."),
    Fault("causal_by_local_positions", lambda x: x.merged(lambda q, k: x.attend(x.shard(q), x.shard(k), causal=True)), text="The mask of each step counted positions from the block's own start. A rank saw half of every other rank's keys, also of later ones. Found in erfanzar/ejkernel 0.0.31.", how="Masks are rules over global positions."),
    Fault("lse_of_zeros", with_lse(np.zeros_like), mask=Mask(), text="A kernel returned zeros in place of its log-sum-exp, and steps were merged by these. All steps weigh the same. In feifeibear/long-context-attention (yunchang), with torch's math and cuDNN kernels.", how="Each kernel's `lse` is part of its contract, and tested."),
    Fault("lse_in_base_2", with_lse(lambda lse: lse / np.log(2)), mask=Mask(), text="A kernel's log-sum-exp has base 2, and was merged as a natural one. Reported as sgl-project/sglang#33325.", how="Each kernel's `lse` is part of its contract, and tested."),
    Fault("strides_ignored", strides_ignored, text="A kernel read keys that are a view as if their memory were contiguous. Numbers are wrong, or NaN, without an error. Said of torch's context parallelism in its own source, and reported as NeMo Automodel#2384.", how="Views are packed before they are sent, or read by their strides."),
    Fault("dropout_drawn_anew", dropout_drawn_anew, options={"dropout_p": 0.3}, text="The backward dropped other weights than the forward: the random state was not saved. Reported as zhuzilin/ring-flash-attention#36.", how="What drops follows from a seed and global indices alone, in both passes."),
    Fault("mask_forgotten_in_the_backward", mask_forgotten_in_the_backward, text="The backward was told neither ``causal`` nor offsets, and masked each hop by itself. Norms of gradients were 1.5 times too large. Found in erfanzar/ejkernel 0.0.80.3, Pallas.", how="Both passes run the items of one plan."),
)  # fmt: skip
