"""Diagnosis of this machine: what can run, why the rest cannot, and if the results are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ring_core import LAYOUTS, Mask
from ring_core.programs.steps import takes_layout
from ring_core.tools import doctor
from ring_core.tools.bench import watched
from ring_core.tools.case import Case
from ring_core.tools.doctor import Check
from ring_torch import strategies
from ring_torch.attention import ring_attention
from ring_torch.kernels import in_order
from ring_torch.kernels.api import Kernel
from ring_torch.local import LocalRanks
from ring_torch.sharding import Sharding
from ring_torch.strategies import Way, ways

LIBRARIES = (
    "numpy", "torch", "triton", "jax-triton", "flash-attn-4", "flash-attn-3", "flash-attn",
    "transformers",
)  # fmt: skip
RANKS = 2  # processes of the ring's self-test

Arrays = Sequence[npt.NDArray[Any]]


def diagnose() -> doctor.Diagnosis:
    """Examine this machine, and test each kernel and each way of moving keys that can run on it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if accelerator is None else accelerator.type
    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    peers = torch.cuda.can_device_access_peer
    # GPUs whose memory each GPU, of CUDA or ROCm, can access directly.
    reaches = [tuple(i for i in indices if i != n and peers(n, i)) for n in indices]
    kernels = in_order(device)
    reports = [kernel_report(kernel, device) for kernel in kernels]
    able = [kernel for kernel, report in zip(kernels, reports, strict=True) if report.available]
    way_reports = []
    for spec, transport in all_ways():
        name, where = f"{spec.name}/{transport.name}", ", ".join(transport.devices) or "any"
        reason = transport.missing(device, reaches)
        if not dist.is_available():
            reason = "this torch is built without torch.distributed"
        way_reports.append(doctor.Report(name, where, available=not reason, why=reason))
    libraries = versions()
    ready = [x.name.split("/") for x in way_reports if x.available]
    checks = chain(
        (check for kernel in able for check in self_test(kernel, device)),
        ring_test(ready, cuda=len(reaches) >= RANKS),
    )
    return doctor.Diagnosis(
        versions=libraries,
        clashes=doctor.clashes(libraries),
        checks=tuple(watched(checks, len(doctor.RESULTS) * (len(able) + len(ready)), "check")),
        tested="kernels on one device, then a ring of two processes, causal,",
        device=device,
        devices=tuple(
            f"{torch.cuda.get_device_name(n)}, compute capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(n)))}, "
            f"reaches {', '.join(map(str, reached)) or 'no other'}"
            for n, reached in enumerate(reaches)
        ),
        kernels=tuple(reports),
        strategies=tuple(way_reports),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, of installed libraries, and of those torch was built with."""
    cudnn = torch.version.cuda and torch.backends.cudnn.version()
    nccl = torch.version.cuda and dist.is_available() and dist.is_nccl_available()
    of_torch = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "cuDNN": cudnn and f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "NCCL": nccl and ".".join(str(part) for part in torch.cuda.nccl.version()),
    }
    return doctor.versions(LIBRARIES, ("ring-core", "ring-torch")) | {
        name: version for name, version in of_torch.items() if version
    }


def kernel_report(kernel: Kernel, device: str) -> doctor.Report:
    """Report if a kernel can run on the accelerator or the CPU of this machine."""
    capabilities = kernel.capabilities
    if capabilities.devices and not {device, "cpu"} & set(capabilities.devices):
        reason: str | None = (
            f"runs on {', '.join(capabilities.devices)}; torch finds no such device here"
        )
    else:
        try:
            reason = kernel.unavailable_reason()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            reason = f"looking for it failed: {error!r}"
    where = ", ".join(capabilities.devices) or "any"
    return doctor.Report(capabilities.name, where, available=reason is None, why=reason or "")


def all_ways() -> tuple[Way, ...]:
    """Return every strategy over every transport that can carry it."""
    return tuple(way for spec in strategies.STRATEGIES for way in ways(spec.name))


def self_test(kernel: Kernel, device: str) -> Iterator[Check]:
    """Test a kernel with a causal call with grouped heads on one device, forward and backward."""
    can = kernel.capabilities
    device = device if not can.devices or device in can.devices else "cpu"
    dtype = "float32" if "float32" in (can.dtypes or ("float32",)) else can.dtypes[0]
    case = Case(1, doctor.TOKENS, 4, 2, 64, dtype, kernel=can.name)
    yield from _compared(can.name, device, case, device, lambda x: _results(0, x, case, device))


def working_kernels(device: str) -> list[str]:
    """Return names of kernels that pass their test here; those of any device are of the CPU."""
    return [
        kernel.capabilities.name
        for kernel in in_order(device)
        if device in (kernel.capabilities.devices or ("cpu",))
        and kernel.unavailable_reason() is None
        and all(check.passed for check in self_test(kernel, device))
    ]


def ring_test(names: Sequence[Sequence[str]], *, cuda: bool) -> Iterator[Check]:
    """Test strategies over transports with the same call between two processes, maybe on GPUs."""
    if not names:
        return
    dtype = "bfloat16" if cuda else "float32"
    with LocalRanks(RANKS, patience=300, cuda=cuda) as ranks:
        for strategy, transport in names:
            layout = next(x for x in ("zigzag", *LAYOUTS) if takes_layout(strategy, x))
            case = Case(
                RANKS, RANKS * doctor.TOKENS, 4, 2, 64, dtype, layout=layout, strategy=strategy,
                transport=transport,
            )  # fmt: skip
            yield from ring_checks(ranks, case, cuda=cuda)


def ring_checks(ranks: LocalRanks, case: Case, *, cuda: bool) -> Iterator[Check]:
    """Check the results of a call on a short sequence, between the given ranks."""
    name, device = f"{case.strategy}/{case.transport}", "cuda" if cuda else "cpu"
    where = f"{len(ranks)} {device} ranks"
    yield from _compared(
        name, where, case, "cpu", lambda x: ranks.run(_results, x, case, device)[0]
    )


def out_and_grads(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """Return the output of an attention function, and dQ, dK and dV."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def _results(rank: int, arrays: Arrays, case: Case, device: str) -> Arrays:
    """Compute attention on a rank; return output and gradients whole."""
    sharding = Sharding(None, case.layout)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    inputs = [_tensor(x, case).to(where) for x in arrays]
    if case.ranks > 1:
        inputs = [sharding.shard(x, dim=1) for x in inputs]
    attend = partial(ring_attention, layout=case.layout, **case.options)
    results = out_and_grads(attend, *inputs)
    return [_array(sharding.unshard(x) if case.ranks > 1 else x) for x in results]


def _compared(
    name: str, where: str, case: Case, device: str, run: Callable[[Arrays], Arrays]
) -> Iterator[Check]:
    """Compare the results of a call with dense attention in float64.

    The errors allowed are a few times those of torch's own dense attention, in the dtype of the
    call and on ``device``.
    """
    inputs = [_tensor(x, case).to(device) for x in doctor.inputs_for(case.ranks, case.head_dim)]
    arrays = [_array(x) for x in inputs]
    yield from doctor.compared(
        name, where, arrays, lambda: run(arrays),
        lambda: [_array(x) for x in out_and_grads(partial(_dense, case.mask), *inputs)],
        torch.finfo(inputs[0].dtype).eps, mask=case.mask,
    )  # fmt: skip


def _tensor(x: npt.NDArray[Any], case: Case) -> Tensor:
    return torch.as_tensor(x, device="cpu").to(getattr(torch, case.dtype))


def _array(x: Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = x.double().cpu().numpy()
    return array


def _dense(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute dense attention with torch's own math implementation, ``[B, T, H, D]``."""
    positions = np.arange(q.shape[1])
    visible = torch.as_tensor(mask.dense(positions, positions), device=q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out.transpose(1, 2)
