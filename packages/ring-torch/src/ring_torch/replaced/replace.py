"""The public function ``replace_sdpa`` and the handle that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, get_args

from torch import nn

from ring_core import KernelConfig, Mask, StrategyConfig, checks
from ring_core.base.arguments import not_none, numbers_as_python
from ring_core.base.config import kernel_config, strategy_config
from ring_torch.comm.ranks import ranks_of
from ring_torch.context import ContextParallel, check_context
from ring_torch.kernels import kernel_names
from ring_torch.replaced import flex
from ring_torch.replaced.calls import Keys, Replacement, Scope
from ring_torch.replaced.mode import RingMode
from ring_torch.replaced.modules import replace_forwards
from ring_torch.replaced.watch import Watch
from ring_torch.strategies import strategy_names
from ring_torch.transports import transport_names
from ring_torch.verification.judgement import VerifyReport
from ring_torch.verification.plain import verify_model


class SDPAHandle:
    """Result of :func:`replace_sdpa`: says what runs on the ring, verifies it, and undoes it.

    Args:
        state: State that the replaced modules share.
        undo: Functions that give modules their classes back.
    """

    def __init__(self, state: Replacement, undo: Sequence[Callable[[], None]]) -> None:
        self._state, self._undo = state, [*undo]
        flex.intercept(state)

    @property
    def modules(self) -> Mapping[str, str]:
        """Modules that have called attention so far, by name: who holds their keys, and how many.

        A module is listed at its first call. Of modules in graphs of ``torch.compile`` there is one
        entry.
        """
        return dict(self._state.modules)

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Offsets ``(0, ..., T)`` of packed documents; set them before each batch.

        They must stay until the backward of the batch has ended, where checkpoints attend again.
        Tokens behind ``T`` are padding, which no document sees.
        """
        return self._state.documents

    @documents.setter
    def documents(self, offsets: Sequence[int] | None) -> None:
        self._state.documents = _checked_documents(offsets)

    def verify(
        self, batch: Mapping[str, Any], *, dims: Mapping[str, int] | None = None
    ) -> VerifyReport:
        """Run a batch on the ring and on the whole module, and compare them.

        Nothing else finds positions that a module counts itself (``arange`` in its forward), means
        over tokens, convolutions, and attention that is not torch's SDPA.
        :meth:`ring_torch.ContextParallel.verify` says what is compared, and what it raises; here a
        call after :meth:`remove` is a ``ValueError``, too.

        Args:
            batch: Arguments of the module by name, of whole sequences, the same on all ranks.
            dims: Dimension of the sequence of each argument that you shard, as there.

        Example::

            handle = ring_torch.replace_sdpa(model, cp)
            print(handle.verify({"x": x, "positions": positions}, dims={"x": 1, "positions": 0}))
        """
        if self._state.removed:
            raise ValueError("verify: remove() was called; call replace_sdpa again")
        return verify_model(self._state.root, check_context(self._state.cp), batch, dims)

    def remove(self) -> None:
        """Undo all changes: the module is as it was before. A second call does nothing.

        A module keeps its class if another library has derived one from it since, and attends by
        torch even so.
        """
        self._state.removed = True  # also where another library has derived classes of ours
        flex.release(self._state)
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = (f"{name}: {text}" for name, text in self._state.modules.items())
        return "\n".join(lines) or "no module has called scaled_dot_product_attention yet"


@numbers_as_python
def replace_sdpa(
    module: nn.Module,
    cp: ContextParallel,
    *,
    whole_keys: Sequence[str] = (),
    sharded_keys: Sequence[str] = (),
    local: Sequence[str] = (),
    documents: Sequence[int] | None = None,
    kernel: str | KernelConfig = "auto",
    strategy: str | StrategyConfig = "auto",
    transport: str = "auto",
    deterministic: bool = False,
) -> SDPAHandle:
    """Run every ``scaled_dot_product_attention`` inside a module on the ring; its code stays.

    The module is then given this rank's tokens, and everything in it but attention works token by
    token. **Positions that it counts itself are wrong**, and nothing here sees them: pass
    ``cp.positions``, and call :meth:`SDPAHandle.verify` once.

    Calls are answered in every module's own forward, so also where activation checkpointing
    computes it again, under ``torch.compile``, autocast and FSDP2. A
    :class:`torch.nn.MultiheadAttention` is included, and returns ``None`` for its weights.
    Parameters, hooks and ``state_dict`` stay as they are. A module's class becomes a derived one,
    so pickle a ``state_dict``, not a module.

    ``is_causal``, ``scale``, ``enable_gqa`` and ``dropout_p`` mean what they do on one device;
    dropout draws a seed from torch's generator of the CPU, which has to be alike on all ranks. An
    ``attn_mask``, boolean or added, is ``[..., 1, T_local]`` of a rank's own keys, or has a column
    for each of the ``T`` keys of all ranks, in natural order: ``[..., 1, T]``, ``[..., T_local,
    T]`` or ``[..., T, T]``.

    Names of modules are as in ``named_modules()``, may have ``*``, and include all modules inside.

    Args:
        module: The module. Its inputs are shards in the layout of ``cp``.
        cp: The ranks that share a sequence, and its layout.
        whole_keys: Modules whose keys every rank holds whole, as a text beside a video's shards.
            Nothing is sent. The gradients of keys and values are this rank's part, as of replicated
            parameters: their sum over ranks is the whole, and the reduction of the parameters'
            gradients makes it.
        sharded_keys: Modules whose keys are a rank's part of another sequence, as a decoder's
            cross attention to an encoder's tokens.
        local: Modules that attend within this rank's own tokens, by torch itself: windows, frames,
            a text that every rank encodes whole.
        documents: Offsets ``(0, ..., T)`` of packed documents, which see themselves alone. If ``T``
            is less than the shards hold, what lies behind it is padding. The handle's ``documents``
            changes them.
        kernel: Kernel of each call, as in :func:`ring_attention`.
        strategy: Strategy of each call, likewise.
        transport: Transport of each call, likewise.
        deterministic: True for gradients that are equal bit by bit in every run.

    Returns:
        A handle that lists, verifies and undoes.

    Raises:
        ValueError: An argument is malformed, a name fits no module, a module is named in two of the
            options, its attention is replaced already, or its forward is set on the module itself,
            as hooks of accelerate set it. Later, from the forward: masks of wrong shapes.
        UnsupportedError: A module cannot be replaced. Later, from the forward, with the module's
            name: a call that cannot be exact on a split sequence; or no call at all.

    Example::

        handle = ring_torch.replace_sdpa(model, cp)
        out = model(cp.shard(x), positions=cp.positions(T))  # this rank's tokens
        print(handle)  # which modules attended, and to what
    """
    sharding = check_context(cp, acting=False)
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    checks.check_choice("transport", transport, transport_names())
    checks.check_flag("deterministic", deterministic)
    watch = Watch(
        lambda: ranks_of(cp.group), frozenset(n for x in module.parameters() for n in x.shape)
    )
    state = Replacement(
        cp,
        sharding,
        ContextParallel(sharding.group, "contiguous"),
        module,
        kernel_config(kernel, kernel_names()),
        strategy_config(strategy, strategy_names()),
        transport,
        deterministic,
        watch,
        RingMode,
        _checked_documents(documents),
    )
    # A module that is used in several places has as many names.
    names = {
        name.replace("_orig_mod.", ""): x
        for name, x in module.named_modules(remove_duplicate=False)
    }
    for name, x in names.items():
        state.names.setdefault(id(x), name or type(x).__name__)
    patterns: dict[Keys, Sequence[str]] = {
        "whole": _checked_names("whole_keys", whole_keys, [*names]),
        "sharded": _checked_names("sharded_keys", sharded_keys, [*names]),
        "local": _checked_names("local", local, [*names]),
    }
    scopes = {keys: Scope(state, keys) for keys in get_args(Keys)}
    scope_of: dict[int, Scope] = {}
    for name, x in names.items():
        keys = _key_holder_of(name, patterns)
        scope = scope_of.setdefault(id(x), scopes[keys])
        if scope.keys != keys and not scope.others:
            scope_of[id(x)] = Scope(state, scope.keys, f"{name}, of {keys} keys")
    undo: list[Callable[[], None]] = []
    try:
        undo.extend(replace_forwards(module, lambda x: scope_of[id(x)]))
    except BaseException:
        SDPAHandle(state, undo).remove()
        raise
    return SDPAHandle(state, undo)


def _checked_documents(offsets: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return offsets of documents as integers.

    Raises:
        ValueError: They are no increasing integers from 0 on.
    """
    if offsets is None:
        return None
    try:
        mask = Mask(cu_seqlens=offsets)  # type: ignore[arg-type]  # which it makes a tuple
    except ValueError as error:
        raise ValueError(str(error).replace("cu_seqlens", "documents")) from None
    return tuple(int(x) for x in not_none(mask.cu_seqlens))


def _checked_names(option: str, names: Sequence[str], modules: Sequence[str]) -> Sequence[str]:
    """Check names of modules, each of which must fit one.

    Raises:
        ValueError: It is no sequence of texts, or fits none.
    """
    are_listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not are_listed or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{option} must be names of modules, as ('decoder.cross',), got {names!r}")
    for name in names:
        if not any(fnmatchcase(module, name) for module in modules):
            raise ValueError(
                f"{option}: no module is named {name!r}; there are {', '.join(modules[1:13]) or 'none inside'}"
            )
    return names


def _key_holder_of(name: str, patterns: Mapping[Keys, Sequence[str]]) -> Keys:
    """Return the holder of a module's keys, by its name and those of the modules around it.

    Raises:
        ValueError: Two options name it.
    """
    parts = name.split(".")
    around = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    kinds = [
        keys
        for keys, names in patterns.items()
        if any(fnmatchcase(outer, pattern) for outer in around for pattern in names)
    ]
    if len(kinds) > 1:
        raise ValueError(f"replace_sdpa: {name} is named in more than one of the options")
    return kinds[0] if kinds else "own"
