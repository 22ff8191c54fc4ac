"""Ranks copy out of each other's memory depending on their hosts and GPUs; errors say why not."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ring_torch import ContextParallel
from ring_torch.comm.ranks import PeerError, Ranks
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.strategies import describe_strategy
from ring_torch.transports.symm_buffer import DeviceLocation, gather_numbers, refusals

ONE, OTHER = 7, 8  # hosts
ALL = [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("places", "reaches", "overlapping", "word"),
    [
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 2, 1)], ALL, False, None),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 2, 0)], ALL, False, "ALLOW_OVERLAPPING"),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 2, 0)], ALL, True, None),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(OTHER, 2, 1)], ALL, True, "several hosts"),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(OTHER, 2, 0)], ALL, False, "several hosts"),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 1, 0)], ALL, True, "share a GPU"),
        ([DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 1, 1)], ALL, False, "share a GPU"),
        (
            [DeviceLocation(ONE, 1, 0), DeviceLocation(ONE, 2, 1)],
            [[1, 1], [0, 1]],
            False,
            "do not reach",
        ),
    ],
)
def test_gpus_are_told_apart_by_what_they_are(
    places: list[DeviceLocation], reaches: list[list[int]], overlapping: bool, word: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1" if overlapping else "0")
    reasons = list(refusals(places, reaches))
    assert (reasons == []) == (word is None)
    assert word is None or word in reasons[0]


def test_a_peer_that_is_lost_meanwhile() -> None:
    lost = dist.DistBackendError("Connection closed by peer")
    with (
        patch.object(dist, "all_gather", side_effect=lost),
        pytest.raises(PeerError, match="in vain for rank 1 of the group: Connection closed"),
    ):
        gather_numbers(Ranks(None, 0, 2), [1, 2], torch.device("cpu"))


def test_explain_says_why_keys_are_not_gathered() -> None:
    x = torch.zeros(1, 8, 1, 8)
    call, inputs = check_call(Ranks(None, 0, 4), 0, "striped", x, x, x, CallOptions())
    said = describe_strategy(call, inputs)
    reason = "layout 'striped' assigns tokens one by one"
    assert said.startswith(f"strategy ring, transport p2p\n  not gather over symm_mem: {reason}")
    assert "need CUDA tensors and a nccl group" in said
    assert "one rank: nothing travels" in ContextParallel().explain(x, x, x)


@pytest.mark.parametrize(
    ("heads", "biased", "reason"),
    [
        (8, False, "trading heads moves at least 75 % of the bytes of a gather, and 'auto' takes it up to 55 %"),
        (4, True, "the bias would travel, too"),
        (4, False, None),
    ],
)  # fmt: skip
def test_explain_says_why_heads_are_not_traded(
    heads: int, biased: bool, reason: str | None
) -> None:
    q, k = torch.zeros(1, 8, heads, 8), torch.zeros(1, 8, 4, 8)
    options = CallOptions(causal=True, bias=torch.zeros(1, heads, 8, 32) if biased else None)
    said = describe_strategy(*check_call(Ranks(None, 0, 4), 0, "zigzag", q, k, k, options))
    lines = [line for line in said.split("\n") if "ulysses" in line]
    of_machine = "copies out of the peers' memory need CUDA tensors and a nccl group"
    assert lines == [f"  not ulysses over symm_mem: {reason or of_machine}"]
