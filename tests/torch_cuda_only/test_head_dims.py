"""Every head dim on one GPU, and two: right, in dims that a library has, or refused by name."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import Case
from tolerances import assert_close

from ring_core import Mask
from ring_torch import ring_attention
from ring_torch.kernels import KERNELS
from ring_torch.kernels.library import LaunchOptions
from ring_torch.local import LocalRankError

DIMS = [
    *((dim, dim) for dim in (40, 64, 80, 96, 112, 128, 136, 160, 192, 256)),
    (192, 128), (160, 128), (128, 64), (64, 128), (128, 192),
]  # fmt: skip
HEADS = [(2, 2), (8, 2)]
LENGTH = 330
#: Masks, and the number of keys if it differs from the number of queries.
MASKS: dict[str, tuple[Mask, int | None]] = {
    "full": (Mask(), None),
    "causal": (Mask(causal=True), None),
    "window": (Mask(window=(60, 30)), 450),
    "nothing seen": (Mask(causal=True), 250),
    "documents": (Mask(causal=True, cu_seqlens=(0, 97, 98, 230, LENGTH)), None),
    "documents, window": (Mask(window=(40, 10), cu_seqlens=(0, 97, 98, 230, LENGTH)), None),
}
CASES = [
    Case(
        f"head-dims-{dims[0]}-{dims[1]}-{heads[0]}-{heads[1]}-{name.replace(' ', '-')}-cp{ranks}",
        mask, "zigzag" if ranks > 1 else "contiguous", ranks, LENGTH + (ranks - 1) * 2,
        None if keys is None else keys + (ranks - 1) * 2, 2, heads, dims, "bfloat16",
    )
    for dims, heads, (name, (mask, keys)), ranks in product(DIMS, HEADS, MASKS.items(), (1, 2))
    if ranks == 1 or name in {"causal", "window"}
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_fa4(case: Case, backend: Any) -> None:
    """Kernel fa4 runs every case on Hopper, elsewhere those with head dims up to 128."""
    try:
        results = backend.run(case, kernel="fa4", transport="auto")
    except LocalRankError as error:
        if torch.cuda.get_device_capability()[0] == 9 or "kernel 'fa4'" not in str(error):
            raise
        return
    assert_close(case, results)


@pytest.mark.parametrize("dim", [48, 80, 112])
def test_the_library_is_still_wrong_there(dim: int) -> None:
    """The library is still wrong at these head dims; if that is fixed they need no padding."""
    (kernel,) = (known for known in KERNELS if known.capabilities.name == "fa4")
    flash: Any = kernel.flash  # type: ignore[attr-defined]  # only a FlashKernel has it
    torch.manual_seed(0)
    shape = (1, 256, 2, dim)
    leaves = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2).float() for x in leaves)
    scores = q @ k.transpose(2, 3) * dim**-0.5
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    expected = torch.autograd.grad(out, leaves, dout.float())
    options = LaunchOptions(dim**-0.5, None, (None, None), None, False)
    inputs = [x.detach() for x in leaves]
    with torch.no_grad():
        try:
            grads = flash.backward(
                dout, *inputs, out.bfloat16(), scores.logsumexp(-1).contiguous(), options, None
            )
        except Exception:
            if dim != 112:  # there it does not compile
                raise
            return
    pairs = zip(grads, expected, strict=True)
    assert max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs) > 0.1


@pytest.mark.parametrize("option", ["none", "sinks", "segment_ids", "alibi_slopes", "fewer keys"])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (40, 100)])
def test_without_a_backward(dims: tuple[int, int], option: str) -> None:
    """Without a backward ``lse`` is not written; the output is the same, in a second call too."""
    torch.manual_seed(0)
    shapes = ((4, dims[0]), (2, dims[0]), (2, dims[1]))
    q, k, v = (
        torch.randn(2, LENGTH, *shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    )
    choices: dict[str, dict[str, Any]] = {
        "none": {}, "sinks": {"sinks": torch.ones(4, device="cuda")},
        "segment_ids": {"segment_ids": torch.arange(LENGTH, device="cuda").int().repeat(2, 1) // 90},
        "alibi_slopes": {"alibi_slopes": torch.ones(4, device="cuda")},
        "fewer keys": {"causal": False, "mask": Mask(causal=True)},
    }  # fmt: skip
    if option == "fewer keys":  # the first queries see nothing
        k, v = k[:, 80:], v[:, 80:]
    attend = partial(
        ring_attention, q, k, v, **{"causal": True, "kernel": "fa4", **choices[option]}
    )
    expected = attend()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(attend(), expected)
