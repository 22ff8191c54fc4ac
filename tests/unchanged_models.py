"""Small models of common architectures, written without knowledge of rings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention  # by name, as in much user code
from torch.utils.checkpoint import checkpoint

DIM, HEADS, VOCAB = 16, 2, 11


def heads(x: Tensor) -> Tensor:
    """Return ``[B, T, H * D]`` as ``[B, H, T, D]``."""
    y: Tensor = x.unflatten(-1, (-1, DIM // HEADS))
    return y.transpose(1, 2)


class SelfAttention(nn.Module):
    """Attention layer of a GPT: causal, with dropout in training."""

    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.is_causal, self.dropout = is_causal, 0.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (heads(y) for y in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
        )  # fmt: skip
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class CrossAttention(nn.Module):
    """Attention to another sequence, by a function imported by name."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = (heads(y) for y in self.kv(context).chunk(2, dim=-1))
        y = scaled_dot_product_attention(heads(self.q(x)), k, v, attn_mask=mask)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Layer of a transformer before its norm, with cross attention if it is a decoder's."""

    def __init__(self, *, is_causal: bool, has_context: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), SelfAttention(is_causal=is_causal)
        self.cross = CrossAttention() if has_context else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM)
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        x = x + self.attention(self.norm(x), mask)
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, context_mask)
        y: Tensor = x + self.mlp(x)
        return y


class GPT(nn.Module):
    """Language model; without ``positions`` it makes them itself, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.blocks = nn.ModuleList(Block(is_causal=True) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)
        self.use_reentrant: bool | None = None

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        y: Tensor = self.head(x)
        return y


class EncoderDecoder(nn.Module):
    """Torch's own encoder of video and padded text; a decoder attends to it, then to a prompt."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = Block(is_causal=True, has_context=True)
        self.last = Block(is_causal=False, has_context=True)

    def forward(
        self, video: Tensor, text: Tensor, is_text: Tensor, target: Tensor, prompt: Tensor
    ) -> Tensor:
        is_seen = torch.cat([torch.ones_like(video[..., 0], dtype=torch.bool), is_text], dim=1)
        source = self.encoder(torch.cat([video, text], dim=1), src_key_padding_mask=~is_seen)
        added = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)[:, None, None]
        y: Tensor = self.last(self.decoder(target, None, source, added), None, prompt)
        return y


#: For each model, the sequence dimensions of its inputs, and options of ``replace_sdpa``.
MODELS: dict[str, tuple[type[nn.Module], dict[str, int], dict[str, Any]]] = {
    "gpt": (GPT, {"tokens": 1, "positions": 0}, {}),
    "pair": (
        EncoderDecoder, {"video": 1, "text": 1, "is_text": 1, "target": 1},
        {"whole_keys": ("last.cross",), "sharded_keys": ("decoder.cross",)},
    ),
}  # fmt: skip


def model_of(name: str) -> Any:
    """Return a model, with the same weights at each call."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def batch_of(name: str) -> dict[str, Tensor]:
    """Return a whole batch of a model."""
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    positions = torch.arange(16)
    is_text = torch.arange(8) < torch.tensor([[3], [8]])
    return {
        "gpt": {"tokens": torch.randint(VOCAB, (2, 16), generator=draw), "positions": positions},
        "pair": {
            "video": random(2, 12, DIM), "text": random(2, 8, DIM), "is_text": is_text,
            "target": random(2, 16, DIM), "prompt": random(2, 5, DIM),
        },
    }[name]  # fmt: skip
