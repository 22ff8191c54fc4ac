"""The cost model agrees with sums done by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from cases import diagonals

from ring_core import Mask, StrategyConfig, balanced_layout, make_plan, ring_program
from ring_core.cost import (
    HARDWARE,
    Cost,
    Hardware,
    Model,
    bytes_by_link,
    bytes_sent,
    compare,
    estimate,
    hardware,
)
from ring_core.cost.sent import bytes_held

# B=3, H=2, K=1, D=4, Dv=6, 2 bytes: 2 * 3 * 2 * (4 + 6) = 120 FLOPs a pair forward, 300 backward.
MODEL = Model(num_q_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=6, batch=3)
# One pair a second in both passes, 24 bytes a second, one second a message.
SLOW = Hardware("slow", 120e-12, 300e-12, 24e-9, 1e6, "made up")


def test_plain_ring_by_hand() -> None:
    # Four tokens a rank. Pairs: [[10, 10], [0, 16]].
    program = ring_program(make_plan(Mask(causal=True), seq_len=8, cp_size=2))
    assert program.work().tolist() == [[10, 10], [0, 16]]
    # K/V is 3 * 4 * 1 * (4 + 6) * 2 = 240 bytes, out 3 * 4 * 2 * 6 * 4 = 576.
    forward = estimate(program, MODEL, SLOW, backward=False)
    assert asdict(forward) == pytest.approx(
        {
            "flops": 26 * 120,
            "bytes_sent": 240,
            "messages": 1,
            "active_steps": 2,
            "imbalance": 26 / 18,
            "memory_bytes": 2 * 240 + 576,
            "compute_s": 10 + 16,
            "exposed_s": 1,
            "time_s": (1 + 240 / 24) + 16,
        }
    )
    # Backward: dK/dV of 480 bytes go home under the own block; dQ is 3 * 4 * 2 * 4 * 4 = 384.
    both = estimate(program, MODEL, SLOW)
    assert asdict(both) == pytest.approx(
        {
            "flops": 26 * 120 * 3.5,
            "bytes_sent": 240 + 480,
            "messages": 2,
            "active_steps": 2,
            "imbalance": 26 / 18,
            "memory_bytes": 2 * 240 + 384 + 3 * 480,
            "compute_s": 26 + 26,
            "exposed_s": 1 + 11,
            "time_s": 27 + 16 + (1 + 480 / 24),
        }
    )


@pytest.mark.parametrize("pieces", [1, 4])
def test_balanced_ring_by_hand(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ring_core.cost.estimates.offload_pieces", lambda _rows: pieces)
    # Rank 0 takes half of the block below the diagonal. Pairs: [[10, 10], [8, 8]].
    program = ring_program(
        make_plan(Mask(causal=True), seq_len=8, cp_size=2, layout="contiguous"), "balanced"
    )
    assert program.work().tolist() == [[10, 10], [8, 8]]
    q, dout, dq = 3 * 4 * 2 * 4 * 2, 3 * 4 * 2 * 6 * 2, 3 * 4 * 2 * 4 * 4
    out, lse = 3 * 4 * 2 * 6 * 4, 3 * 4 * 2 * 4
    shipped = q + dout + 2 * lse
    # Lent queries travel in pieces, one ahead of the kernels; their results return behind.
    # Forward: K/V and a piece of q under the own block; the last out and lse under nothing.
    ship, home, more = q / pieces, (out + lse) / pieces, pieces - 1
    helping = max(8, more * (2 + (ship + home) / 24))
    forward = (2 + (240 + ship) / 24) + helping + (1 + home / 24)
    # Backward: the first q, dO, lse, delta leave before anything runs; dK/dV and the last dQ go
    # home under the own block.
    ship, home = shipped / pieces, dq / pieces
    helping = max(8, more * (2 + (ship + home) / 24))
    backward = (1 + ship / 24) + helping + (2 + (480 + home) / 24)
    assert asdict(estimate(program, MODEL, SLOW)) == pytest.approx(
        {
            "flops": 18 * 120 * 3.5,
            "bytes_sent": 240 + q + out + lse + shipped + 480 + dq,
            "messages": 2 * (3 + 2 * more),
            "active_steps": 2,
            "imbalance": 1,
            "memory_bytes": 2 * 240 + dq + 3 * 480 + q + dout + dq,
            "compute_s": 36,
            "exposed_s": forward + backward - 36,
            "time_s": forward + backward,
        }
    )


def test_messages_of_a_longer_ring() -> None:
    program = ring_program(make_plan(Mask(), seq_len=64, cp_size=4))
    # Forward 3 K/V; backward 2 K/V (the last to arrive is kept) and 3 dK/dV.
    assert estimate(program, MODEL, SLOW, backward=False).messages == 3
    assert estimate(program, MODEL, SLOW).messages == 3 + 2 + 3
    kv = 3 * 16 * 1 * 10 * 2
    assert estimate(program, MODEL, SLOW).bytes_sent == 5 * kv + 3 * 2 * kv


def test_a_single_rank_moves_nothing() -> None:
    program = ring_program(make_plan(Mask(causal=True), seq_len=8, cp_size=1))
    cost = estimate(program, MODEL, SLOW)
    assert (cost.bytes_sent, cost.messages, cost.active_steps, cost.exposed_s) == (0, 0, 1, 0)
    assert cost.time_s == pytest.approx(2 * 36)
    assert cost.memory_bytes == 3 * 8 * 2 * 4 * 4 + 3 * 8 * 1 * 10 * 4  # dQ and one dK/dV


def test_equal_head_dims_cost_four_flops_an_element() -> None:
    model = Model(num_q_heads=32, num_kv_heads=8, head_dim=128)
    program = ring_program(make_plan(Mask(), seq_len=1024, cp_size=4, layout="zigzag"))
    forward = estimate(program, model, hardware("tpu-v5e"), backward=False)
    assert forward.flops == 4 * 256 * 1024 * 32 * 128


def test_a_window_sends_only_what_someone_sees() -> None:
    model, device = Model(8, 8, 64), hardware("h200-nvlink")
    window, full = (
        estimate(ring_program(make_plan(mask, seq_len=4096, cp_size=8)), model, device)
        for mask in (Mask(window=(100, 0)), Mask())
    )
    assert window.active_steps == 2
    assert window.bytes_sent < full.bytes_sent / 4


def test_fewer_key_value_heads_send_less_and_compute_the_same() -> None:
    program = ring_program(make_plan(Mask(causal=True), seq_len=4096, cp_size=8, layout="zigzag"))
    many, few = (estimate(program, Model(32, heads, 128), hardware("tpu-v5p")) for heads in (32, 8))
    assert many.bytes_sent == 4 * few.bytes_sent
    assert many.compute_s == few.compute_s


def test_keys_count_by_their_own_length() -> None:
    program = ring_program(make_plan(Mask(), seq_len=8, cp_size=2, kv_seq_len=32))
    cost = estimate(program, MODEL, SLOW, backward=False)
    assert cost.bytes_sent == 3 * 16 * 1 * 10 * 2
    assert cost.flops == 4 * 32 * 120


def test_thousands_of_ranks() -> None:
    program = ring_program(
        make_plan(Mask(causal=True), seq_len=1 << 20, cp_size=2048, layout="contiguous"), "balanced"
    )
    cost = estimate(program, Model(32, 8, 128), hardware("tpu-v5p"))
    assert cost.active_steps == 1025
    assert cost.time_s == pytest.approx(cost.compute_s + cost.exposed_s)


def test_compare_ranks_layouts() -> None:
    model, device = Model(32, 8, 128), hardware("h200-nvlink")
    costs = compare(Mask(causal=True), seq_len=1 << 17, cp_size=4, model=model, hardware=device)
    assert list(costs) == [
        "contiguous/ring", "contiguous/balanced", "zigzag/ring", "striped/ring", "chunks/ring",
    ]  # fmt: skip
    plain, zigzag = costs["contiguous/ring"], costs["zigzag/ring"]
    assert isinstance(plain, Cost)
    assert isinstance(zigzag, Cost)
    # Contiguous causal work takes (2P - 1) / P times as long where communication is hidden.
    assert plain.time_s / zigzag.time_s == pytest.approx(7 / 4, rel=1e-3)
    program = ring_program(
        make_plan(Mask(causal=True), seq_len=1 << 17, cp_size=4, layout="zigzag")
    )
    assert zigzag == estimate(program, model, device)


def test_compare_balances_chunks_for_the_mask() -> None:
    mask = Mask(causal=True, cu_seqlens=(0, 100, 900, 4096))
    sizes: dict[str, Any] = {"seq_len": 4096, "cp_size": 4}
    costs = compare(mask, **sizes, model=MODEL, hardware=SLOW, layouts=("zigzag", "chunks"))
    program = ring_program(make_plan(mask, layout=balanced_layout(mask, **sizes), **sizes))
    assert costs["chunks/ring"] == estimate(program, MODEL, SLOW)
    assert list(costs) == ["zigzag/ring", "chunks/ring"]
    estimates = compare(
        Mask(predicate=diagonals), seq_len=16, cp_size=4, model=MODEL, hardware=SLOW
    )
    assert "cannot count a predicate" in str(estimates["chunks/ring"])


def test_compare_says_which_layout_cannot_divide() -> None:
    costs = compare(Mask(), seq_len=20, cp_size=4, model=MODEL, hardware=SLOW)
    assert "pad to 24" in str(costs["zigzag/ring"])
    assert isinstance(costs["contiguous/ring"], Cost)


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (Mask(cu_seqlens=(0, 8)), {}, "must end at the sequence length 16"),
        (Mask(), {"cp_size": 0}, "cp_size must be at least 1"),
        (
            Mask(),
            {"layouts": ("contiguous", "zagzig")},
            "unknown layout 'zagzig'; known: contiguous",
        ),
    ],
)
def test_compare_refuses_what_no_layout_can_do(
    mask: Mask, options: dict[str, Any], message: str
) -> None:
    call: dict[str, Any] = {"seq_len": 16, "cp_size": 4, "model": MODEL, "hardware": SLOW}
    with pytest.raises(ValueError, match=message):
        compare(mask, **(call | options))


def test_unknown_hardware_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown hardware 'abacus'; known: h200-nvlink.*tpu-v6e"):
        hardware("abacus")


def test_presets_name_their_sources_and_cannot_be_changed() -> None:
    assert all(hardware(name).name == name and hardware(name).source for name in HARDWARE)
    for name in ("tpu-v5e", "tpu-v5p", "tpu-v6e"):
        assert "planning figure" in hardware(name).source
    with pytest.raises(TypeError):
        HARDWARE["mine"] = SLOW  # type: ignore[index]  # wrong on purpose


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((6, 4, 64), "multiple of num_kv"), ((0, 1, 64), "num_q_heads"), ((4, 4, 0), "head_dim")],
)
def test_impossible_models_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Model(*sizes)


@pytest.mark.parametrize(
    ("rates", "message"),
    [((0, 1, 1, 1), "matmul_tflops"), ((1, 1, -1, 1), "link_gb_s"), ((1, 1, 1, -1), "hop_us")],
)
def test_impossible_hardware_is_refused(rates: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hardware("bad", *rates, "made up")


GROUPS = (StrategyConfig("hybrid"), StrategyConfig("hybrid", ulysses_size=2, outer="gather"))


@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses", *GROUPS])
def test_bytes_by_link_are_those_sent(strategy: Any) -> None:
    plan = make_plan(Mask(causal=True), seq_len=64, cp_size=8, layout="zigzag")
    model = Model(9, 3, 4)
    one_host = bytes_by_link(plan, model, strategy, ranks_per_host=8)
    assert one_host.within_host == bytes_sent(plan, model, strategy)
    assert not any(one_host.between_hosts)
    alone = bytes_by_link(plan, model, strategy, ranks_per_host=1)
    assert not any(alone.within_host)


def test_only_the_last_rank_of_a_host_sends_a_ring_to_the_next() -> None:
    plan = make_plan(Mask(), seq_len=64, cp_size=8)
    sent = bytes_by_link(plan, Model(6, 3, 4), "ring", ranks_per_host=4, backward=False)
    assert [x > 0 for x in sent.between_hosts] == [False, False, False, True] * 2


@pytest.mark.parametrize("outer", ["ring", "gather"])
def test_groups_of_a_host_send_the_second_step_alone_to_others(outer: Any) -> None:
    """Hosts exchange only the outer step: each rank sends like a ring of two, for its heads."""
    plan, halves = (make_plan(Mask(), seq_len=64, cp_size=n, layout="zigzag") for n in (8, 2))
    sent = bytes_by_link(
        plan, Model(8, 4, 4), StrategyConfig("hybrid", outer=outer), ranks_per_host=4
    )
    assert sent.between_hosts == bytes_sent(halves, Model(2, 1, 4), outer) * 4


def test_held_bytes_are_not_guessed() -> None:
    """Held bytes of ``balanced`` are refused: nothing counts the rows that helpers borrow."""
    plan = make_plan(Mask(causal=True), seq_len=8, cp_size=2)
    assert bytes_held(plan, MODEL, "ring") == 120 * (2 * 2 + 3 * 4) + 4 * 6 * 4 * 4
    with pytest.raises(ValueError, match="'balanced'"):
        bytes_held(plan, MODEL, "balanced")
