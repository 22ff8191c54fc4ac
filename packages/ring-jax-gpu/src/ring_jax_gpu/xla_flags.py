"""Flags of XLA that may speed up a ring over GPUs; they are set only by :func:`set_xla_flags`."""

from __future__ import annotations

import os

#: Flags that jaxlib 0.11 and 0.12 know.
XLA_FLAGS = {
    # Copy engines move K/V and gradients. NCCL's kernels need SMs, and the forward for Hopper
    # occupies all of them until it ends. Only among GPUs of one process; else no change.
    "xla_gpu_collective_permute_mode": "peer",
    # In the backward K/V and gradients are in flight at once. With the default of one transfer,
    # XLA makes the second one wait: over P ranks, P - 3 hops of K/V then overlap no kernel.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
}


def set_xla_flags() -> dict[str, str]:
    """Set flags of XLA that let a ring over GPUs send while it computes.

    They are added to the environment variable ``XLA_FLAGS``, which JAX reads once, when it first
    needs a device: call this before. A flag that is in there already stays as it is.

    - ``xla_gpu_collective_permute_mode=peer``: copy engines move K/V and gradients in place of
      NCCL's kernels, which wait for SMs that attention kernels occupy. It has an effect only among
      GPUs of one process.
    - ``xla_gpu_experimental_parallel_collective_overlap_limit=2``: in the backward K/V and
      gradients travel at once; by default XLA makes one of them wait.

    What they gain depends on the program and the machine: measure with and without.

    Returns:
        The flags that were added, with their values.

    Raises:
        ValueError: JAX has started already, or ``XLA_FLAGS`` names a file.
    """
    from jax._src.xla_bridge import backends_are_initialized

    if backends_are_initialized():
        raise ValueError(
            "set_xla_flags() came too late: JAX has started, and reads XLA_FLAGS only once. Call "
            "it before the first array, jax.devices() or jit runs, or set in the environment: "
            f"XLA_FLAGS='{_to_text(XLA_FLAGS)}'"
        )
    present = os.environ.get("XLA_FLAGS", "").strip()
    if present and not present.startswith("-"):
        raise ValueError(
            f"XLA_FLAGS={present!r} names a file of flags, to which none can be added here. Write "
            f"these into it: {_to_text(XLA_FLAGS)}"
        )
    names = {flag.removeprefix("--").partition("=")[0] for flag in present.split()}
    added = {name: value for name, value in XLA_FLAGS.items() if name not in names}
    if added:
        os.environ["XLA_FLAGS"] = f"{present} {_to_text(added)}".lstrip()
    return added


def _to_text(flags: dict[str, str]) -> str:
    """Return flags as ``XLA_FLAGS`` holds them."""
    return " ".join(f"--{name}={value}" for name, value in flags.items())
