"""Kernels that are missing or fail, and programs that only one platform can run.

An error that a plug-in's kernel raises while it is checked or traced refuses programs for its
platform only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from ring_core import Capabilities, UnsupportedError
from ring_core.base.config import EVERYTHING
from ring_jax.records import Array, Kernel

_DEVICES = {"cuda": "NVIDIA GPUs", "tpu": "TPUs"}


@dataclass(frozen=True)
class AbsentKernel(Kernel):
    """A kernel that is missing, fails, or is another project's: it refuses every call.

    Attributes:
        name: Its name, as in ``kernel=``.
        platform: The platform that it is for, as JAX calls it; of another project's kernel the name
            of its entry point.
        package: Name of the package that has it.
        reason: Why it cannot run, and what to do.
        is_broken: True if the package is present but unusable: ``auto`` then refuses its platform
            instead of falling back to ``xla``.
    """

    name: str
    platform: str
    package: str
    reason: str
    is_broken: bool

    @classmethod
    def broken(
        cls, name: str, platform: str, package: str, reason: str,
        instead: str = "install it anew, uninstall it, or use kernel='xla'",
    ) -> AbsentKernel:  # fmt: skip
        """Return the kernel of a package that is present but unusable, and what to do instead."""
        reason = f"{reason}. Programs for {platform} are refused. Instead: {instead}"
        return cls(name, platform, package, reason, is_broken=True)

    @property
    def capabilities(self) -> Capabilities:
        """Every capability on its platform: the reason for refusing is in :meth:`refusals`."""
        return replace(EVERYTHING, name=self.name, devices=(self.platform,))

    def refusals(self, *_: object) -> tuple[str, ...]:
        """Return the reason, whatever the call is."""
        return (self.reason,)

    def attend_into(self, *launch: Any) -> Any:
        """Return the accumulator by a primitive whose lowering raises the reason."""
        message = f"kernel {self.name!r}: {self.reason}"
        return jax.tree.map(partial(only_on_p.bind, platform="", message=message), launch[-1])

    def grads_into(self, *launch: Any) -> Any:
        """Return the accumulator like :meth:`attend_into`."""
        return self.attend_into(*launch)


def broken_kernels(kernels: Iterable[Kernel]) -> tuple[AbsentKernel, ...]:
    """Return the kernels of this project's packages that are installed but cannot be loaded."""
    return tuple(x for x in kernels if isinstance(x, AbsentKernel) and x.is_broken)


def or_broken[T](kernel: Kernel, action: Callable[[], T]) -> T | AbsentKernel:
    """Return what a kernel answers; if it raises, a broken kernel in its place.

    A kernel that is for no platform alone raises its error, as there is no other one.
    """
    try:
        return action()
    except BaseException as error:
        can, package = kernel.capabilities, type(kernel).__module__.partition(".")[0]
        if not can.devices or not is_fault(error):
            raise
        package = package.replace("_", "-")
        if isinstance(error, UnsupportedError):  # in the kernel's own words, which say what to do
            reason = str(error).removeprefix(f"kernel {can.name!r}: ")
            return AbsentKernel(can.name, can.devices[0], package, reason, is_broken=True)
        return AbsentKernel.broken(
            can.name, can.devices[0], package, f"{package} fails, {described(error)}",
            f"use kernel='xla'; kernel={can.name!r} raises the error with its traceback",
        )  # fmt: skip


def is_fault(error: BaseException) -> bool:
    """Return True for an error of code, also in Rust; False for what ends a program.

    ``KeyboardInterrupt``, ``SystemExit`` and whatever else is no ``Exception`` may come from a
    signal handler, in the midst of a kernel that has no part in it.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def described(error: BaseException) -> str:
    """Return an error's type and text."""
    return f"{type(error).__name__}: {error}"


#: The identity of an array, for which there is code on one platform alone, or on none: JAX's own
#: errors about a kernel on another platform do not say what to do. No parameter of a primitive is
#: called ``error``, as ``checkify`` passes one of that name.
only_on_p = Primitive("ring_only_on")


def only_on(platform: str, kernel: str, x: Array) -> Array:
    """Return ``x`` by a primitive that lowers on the kernel's platform, and raises on others."""
    message = wrong_platform(platform, kernel)
    return cast("Array", only_on_p.bind(x, platform=platform, message=message))


def wrong_platform(platform: str, kernel: str) -> str:
    """Return the error of a program with a platform's kernel that is lowered for another one."""
    return (
        f"kernel {kernel!r}: runs on {_DEVICES[platform]}, and this program is lowered for another "
        f"platform, or for several. Instead: use kernel='xla' or 'auto', and lower it for each "
        f"platform alone"
    )


def _lower(here: str, _: object, x: Any, *, platform: str, message: str) -> list[Any]:
    """Lower the primitive for a platform, ``here``: to nothing, or raise its error."""
    if platform != here:
        raise UnsupportedError(message)
    return [x]


def _run(x: Array, **params: str) -> Array:
    """Return ``x`` outside of programs, as under ``jax.disable_jit``.

    It is lowered first, which raises the error on a platform that it is not for.
    """
    jax.jit(partial(only_on_p.bind, **params)).lower(x)
    return x


only_on_p.def_impl(_run)
only_on_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(only_on_p, partial(_lower, "other"))
for _platform in _DEVICES:
    mlir.register_lowering(only_on_p, partial(_lower, _platform), platform=_platform)
batching.defvectorized(only_on_p)


#: Code of one platform in a program for several: JAX lowers each branch of a
#: ``lax.platform_dependent`` for all of them, and code for one has no lowering for the others.
lowered_for_p = Primitive("ring_lowered_for")
lowered_for_p.multiple_results = True


def lowered_for[T](platform: str, function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, lowered for one platform, whatever the program is lowered for."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    results = lowered_for_p.bind(*jax.tree.leaves(args), jaxpr=jaxpr, platform=platform)
    return cast("T", jax.tree.unflatten(jax.tree.structure(shapes), results))


def _lower_for(ctx: mlir.LoweringRuleContext, *args: Any, jaxpr: Any, platform: str) -> Any:
    """Lower a jaxpr for a platform."""
    lower: Any = mlir.lower_fun(jaxpr_as_fun(jaxpr))
    return lower(ctx.replace(platforms=(platform,)), *args)


def _batch_lowered_for(
    args: list[Array], dims: list[int | None], *, jaxpr: Any, platform: str
) -> tuple[list[Array], list[int]]:
    """Batch the jaxpr."""
    batched = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=dims))(*args)
    results = lowered_for_p.bind(*args, jaxpr=batched, platform=platform)
    return results, [0] * len(results)


lowered_for_p.def_impl(lambda *args, jaxpr, **_: jaxpr_as_fun(jaxpr)(*args))
lowered_for_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
mlir.register_lowering(lowered_for_p, _lower_for)
batching.primitive_batchers[lowered_for_p] = _batch_lowered_for
