"""Command-line questions about a call of attention: its arguments, and their options.

``python -m ring_torch explain`` and ``python -m ring_jax explain`` are made of this. Nothing is
computed or sent, and no other process is needed: the answer is that of rank 0.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ring_core.base.config import StrategyName
from ring_core.choose.balance import ALL_LAYOUTS, layout_for
from ring_core.layouts.layout import Layout, LayoutSpec
from ring_core.masks.mask import Mask
from ring_core.tools.sizes import add_each, add_mask_options, head_counts, mask_of


@dataclass(frozen=True)
class ExplainCase:
    """A call to explain: attention of ``[batch, seq_len, heads, head_dim]`` over ``cp_size`` ranks.

    Attributes:
        dtype: A name that both frameworks know, such as ``bfloat16``.
        backward: True if a backward will follow; ``None`` where that changes nothing.
        strategy, kernel, transport: As in a call.
    """

    cp_size: int
    batch: int
    seq_len: int
    kv_seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    backward: bool | None
    mask: Mask
    layout: LayoutSpec
    strategy: StrategyName
    kernel: str
    transport: Any

    @property
    def local_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a rank's queries and of its keys, padded to what the layout takes."""
        queries, keys = (
            Layout.padded(self.layout, length, self.cp_size).local_len
            for length in (self.seq_len, self.kv_seq_len)
        )
        return (
            (self.batch, queries, self.heads, self.head_dim),
            (self.batch, keys, self.kv_heads, self.head_dim),
        )

    @property
    def options(self) -> dict[str, Any]:
        """Options of the call: the mask, names that were chosen, and the length if it is padded."""
        padded = self.local_shapes[0][1] * self.cp_size > self.seq_len
        return {
            "causal": self.mask.causal, "window": self.mask.window,
            "chunk_size": self.mask.chunk_size, "cu_seqlens": self.mask.cu_seqlens,
            "seq_len": self.seq_len if padded else None, "strategy": self.strategy,
            "kernel": self.kernel, "transport": self.transport,
        }  # fmt: skip

    def describe(self, device: str) -> str:
        """Return the tensors of a rank in one line."""
        q, k = self.local_shapes
        passes = {None: "", True: "; forward and backward", False: "; forward"}[self.backward]
        return (
            f"rank 0 of {self.cp_size} has queries {list(q)} and keys {list(k)}, {self.dtype} on "
            f"{device}{passes}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of an ``explain`` command; those of the sequence and mask are ``plan``'s.

    A framework that has ``--backward`` adds it itself.
    """
    add_mask_options(parser)
    add_each(parser, {
        "--cp": {"type": int, "required": True, "metavar": "P", "help": "number of ranks"},
        "--heads": {
            "type": head_counts, "required": True, "metavar": "H/K",
            "help": "query heads, and key/value heads if they are fewer: 32/8",
        },
        "--head-dim": {
            "type": int, "default": 128, "metavar": "D", "help": "head dim; default: %(default)s",
        },
        "--batch": {
            "type": int, "default": 1, "metavar": "B", "help": "sequences; default: %(default)s",
        },
        "--dtype": {
            "choices": ("float64", "float32", "bfloat16", "float16"), "default": "bfloat16",
            "help": "default: %(default)s",
        },
        "--layout": {
            "choices": ALL_LAYOUTS, "default": "zigzag",
            "help": "which rank holds which tokens; default: %(default)s",
        },
        **{
            f"--{name}": {"default": "auto", "metavar": "NAME", "help": f"{meaning}; default: auto"}
            for name, meaning in (
                ("kernel", "a kernel that `matrix` lists"), ("strategy", "what moves between ranks"),
                ("transport", "how it gets there"),
            )
        },
    })  # fmt: skip


def case_of(args: argparse.Namespace) -> ExplainCase:
    """Return the call that a command line asks about.

    Raises:
        ValueError: A size is not positive, or the layout cannot be made.
    """
    for name in ("cp", "seq_len", "head_dim", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    mask, keys = mask_of(args), args.kv_seq_len
    heads, kv_heads = args.heads
    layout = layout_for(args.layout, mask, seq_len=args.seq_len, cp_size=args.cp, kv_seq_len=keys)
    return ExplainCase(
        args.cp, args.batch, args.seq_len, args.seq_len if keys is None else keys, heads, kv_heads,
        args.head_dim, args.dtype, getattr(args, "backward", None), mask, layout, args.strategy, args.kernel,
        args.transport,
    )  # fmt: skip
