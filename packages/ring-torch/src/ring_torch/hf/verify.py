"""Run a batch whole and split, and say where a model computes something else.

What is known of a model by its classes can be wrong for one that nobody has seen. Here it is run:
on the ring, and whole on every rank with two attentions of its own, whose difference is noise.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ring_core import UnsupportedError, WrongResultError, divisor_of
from ring_torch.comm.ranks import Ranks, collective
from ring_torch.hf.models.batch import tokens_of
from ring_torch.hf.models.check import is_of_transformers, unwrapped
from ring_torch.hf.models.classes import has_written_attention, name_of
from ring_torch.hf.models.code import parameters_of
from ring_torch.hf.models.documents import STATED
from ring_torch.hf.models.hooks import ModelHooks
from ring_torch.hf.models.releases import TESTED_RELEASES, installed_release
from ring_torch.hf.trace import (
    LEAST_FLOOR,
    Difference,
    Key,
    Recorder,
    Tokens,
    Trace,
    compare_traces,
)

#: Dicts of a module that are put back as they were.
_DICTS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_buffers",
)  # fmt: skip

#: Part of a typical gradient below which one counts as zero.
_SMALL_GRADIENT = 1e-2

_SEQUENCES = (
    ("input_ids", "inputs_embeds", "attention_mask"),
    ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
)


@dataclass(frozen=True)
class VerifyReport:
    """Differences of a split run from a whole one, all of which are rounding.

    Attributes:
        loss: Of the loss; ``None`` where the model returns none.
        logits: Of its other outputs, the one closest to its limit.
        gradients: Of the gradients of parameters, the one closest to its limit; ``None`` where no
            parameter is trained.
        modules: How many modules' outputs were compared.
    """

    loss: Difference | None
    logits: Difference | None
    gradients: Difference | None
    modules: int

    def __str__(self) -> str:
        parts = {"loss": self.loss, "logits": self.logits, "gradients": self.gradients}
        return "; ".join(f"{name} {x}" for name, x in parts.items() if x is not None)


@dataclass(frozen=True)
class Target:
    """A model that is parallelized.

    Attributes:
        model: The module whose ``__call__`` runs it.
        hooks: Its hooks.
        undo: Functions that take off all that was done to it, the last first.
    """

    model: nn.Module
    hooks: ModelHooks
    undo: list[Callable[[], object]]


@dataclass(frozen=True)
class _Run:
    """What one run made.

    Attributes:
        trace: Records of its modules.
        loss: ``None`` where the model returns none.
        gradients: By the parameter's name; of a split run, summed over the ranks.
    """

    trace: Trace
    loss: float | None
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class _Fault:
    """A difference beyond its limit, the module to blame, and its place among others."""

    order: int
    module: str
    difference: Difference


def verify_target(target: Target, batch: Mapping[str, Any]) -> VerifyReport:
    """Run a batch split and whole, and compare; :meth:`ring_torch.hf.Handle.verify`."""
    if not target.undo:
        raise ValueError("verify: remove() was called, the model is not parallelized any more")
    _check_batch(batch)
    _check_wrappers(target.model)
    runs = _Runs(target, batch)
    with _unchanged(target.model):
        split = runs.run()
        with runs.unhooked():
            whole = runs.run("eager")
            errors = runs.distances(split, whole)
            split.gradients.clear()  # their memory is for those of the next run
            other = runs.run("sdpa") if runs.has_sdpa else runs.run("eager", perturbs=True)
            noise = runs.distances(other, whole)
            sizes = runs.distances(None, whole)
    if whole.loss is not None and not math.isfinite(whole.loss):
        raise ValueError(
            f"verify: the whole model's loss is {whole.loss}, with which nothing can be compared; "
            f"give a batch whose loss is finite"
        )
    traced = compare_traces(split.trace, whole.trace, other.trace, runs.sequences, runs.rows)
    gradients = _of_gradients(errors, noise, sizes, runs, whole.trace.floor)
    return _judged(runs, (split, whole, other), traced, gradients)


class _Runs:
    """Runs of a model on one batch, split and whole."""

    def __init__(self, target: Target, batch: Mapping[str, Any]) -> None:
        self.target, self.model, self.hooks = target, target.model, target.hooks
        self.inner: Any = unwrapped(target.model)
        self.ring = target.hooks.sharding.ring
        self.rows = len(tokens_of(batch))
        self.sequences = [*_sequences(target.hooks, batch)]
        self.recorder = Recorder(target.model, self.sequences, self.rows)
        takes_cache = "use_cache" in parameters_of(type(self.inner))
        self.batch = ({"use_cache": False} if takes_cache else {}) | dict(batch)
        self.parameters = {
            name: x for name, x in target.model.named_parameters() if x.requires_grad
        }
        ranks = {*dist.get_process_group_ranks(self.ring.group)} if self.ring.group else {0}
        self.sharded = {  # by FSDP, which reduces their gradients
            name
            for name, x in self.parameters.items()
            if isinstance(x, DTensor) and len(ranks & {*x.device_mesh.mesh.flatten().tolist()}) > 1
        }

    @property
    def has_sdpa(self) -> bool:
        """Whether all parts of the model can compute their attention with torch's own."""
        parts = [x for x in self.inner.modules() if is_of_transformers(x)]
        return not has_written_attention(self.inner) and all(
            getattr(x, "_supports_sdpa", False) for x in parts
        )

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Take off for a while what ``hf.parallelize`` has done."""
        fields = _Fields(self.model)
        try:
            for undo in reversed(self.target.undo):
                undo()
            yield
        finally:
            fields.put_back()

    def run(self, attention: str | None = None, *, perturbs: bool = False) -> _Run:
        """Run forward and backward, split, or whole with an attention of transformers.

        Raises:
            UnsupportedError: A rank has too little memory.
        """
        if attention is not None and not has_written_attention(self.inner):
            self.inner.set_attn_implementation(attention)
        kind = "split" if attention is None else "whole"
        run: _Run | None = None
        try:
            run = self._run(perturbs=perturbs, is_split=attention is None)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
        self.model.zero_grad(set_to_none=True)
        is_full = torch.tensor(float(run is None), device=_device_of(self.ring))
        if not self.sharded:  # else others wait for this rank elsewhere
            self._all_reduce(is_full, dist.ReduceOp.MAX)
        if run is None or is_full:
            length = "x".join(str(n) for n in tokens_of(self.batch).shape[:2])
            raise UnsupportedError(
                f"verify: a {kind} run of {length} tokens does not fit into the memory of "
                f"{'this' if run is None else 'another'} rank, as every rank runs the whole batch: "
                f"give a shorter batch, or one row of it"
            ) from None
        return run

    def _run(self, *, perturbs: bool, is_split: bool) -> _Run:
        with self.recorder.recording(perturbs=perturbs) as trace:
            output = self.model(**self.batch)
        loss = output.get("loss")
        total = loss if isinstance(loss, Tensor) else self._stand_in(output)
        if total.requires_grad:
            total.backward()
        gradients = {name: x.grad for name, x in self.parameters.items() if x.grad is not None}
        if is_split:
            gradients = self._summed(gradients)
        return _Run(trace, None if total is not loss else float(total.detach()), gradients)

    def _stand_in(self, output: Mapping[str, Any]) -> Tensor:
        """Return a loss for a model that has none: a weighted sum of outputs of tokens."""
        one = self.sequences[-1]
        total = torch.zeros((), device=one.positions.device)
        for x in output.values():
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
                continue
            is_whole = x.shape[1] == one.length
            if len(x) != self.rows or not (is_whole or x.shape[1] == one.local_length):
                continue
            generator = torch.Generator().manual_seed(x.ndim)
            weights = torch.randn(self.rows, one.length, *x.shape[2:], generator=generator)
            weights = weights.to(x.device, x.dtype) * one.real.reshape(
                *one.real.shape, *[1] * (x.ndim - 2)
            )
            if is_whole:
                total = total + (x * weights).sum()
            else:
                part = x[:, one.local_positions] * weights[:, one.positions]
                total = total + part.sum() * self.hooks.factor
        return total

    def _summed(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients of a split run, summed over the ranks; FSDP has reduced its own."""
        summed = {}
        for name, weight in self.parameters.items():
            gradient = gradients.get(name)
            if name in self.sharded or self.ring.size == 1:
                if gradient is not None:
                    summed[name] = gradient
                continue
            local = _local(torch.zeros_like(weight) if gradient is None else gradient)
            total = local.to(torch.promote_types(local.dtype, torch.float32))
            self._all_reduce(total)
            summed[name] = total.div_(self.hooks.factor).to(local.dtype)
        return summed

    def distances(self, run: _Run | None, whole: _Run) -> Tensor:
        """Return ``|a - b|`` of each parameter's gradient, ``[P]``; without a run ``|b|``."""
        squares = [torch.zeros((), dtype=torch.float64, device=_device_of(self.ring))]
        for name, weight in self.parameters.items():
            gradients = [x.gradients.get(name) for x in (run, whole) if x is not None]
            a, b = (0 if x is None else _local(x).double() for x in ([None, *gradients])[-2:])
            square = torch.as_tensor(a - b, device=weight.device).square().sum()
            squares.append(square.to(squares[0]))
        total = torch.stack(squares[1:] or squares)
        self._all_reduce(total)  # each rank has other parts of what is sharded
        return total.sqrt().nan_to_num(nan=torch.inf)

    def agreed(self, numbers: list[float]) -> list[list[float]]:
        """Return the numbers of every rank."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=_device_of(self.ring))
        every = (
            [mine]
            if self.ring.size == 1
            else [torch.empty_like(mine) for _ in range(self.ring.size)]
        )
        if self.ring.size > 1:
            with collective(self.ring, "verify"):
                dist.all_gather(every, mine, group=self.ring.group)
        return [x.tolist() for x in every]

    def _all_reduce(self, x: Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        if self.ring.size > 1:
            with collective(self.ring, "verify"):
                dist.all_reduce(x, how, group=self.ring.group)


def _judged(
    runs: _Runs,
    results: tuple[_Run, _Run, _Run],
    traced: Mapping[Key, Difference],
    gradients: Mapping[str, Difference],
) -> VerifyReport:
    """Return the report on which all ranks agree.

    Raises:
        WrongResultError: Something differs by more than rounding.
    """
    split = results[0]
    outputs = [x for (name, _, kind, _), x in traced.items() if (name, kind) == ("", "returned")]
    found = _worst(outputs)
    logits = found if found is None else outputs[found]
    values = [*gradients.values()]
    found = _worst(values)
    gradient = found if found is None else values[found]
    loss = _of_loss(results, logits, runs)
    fault = _first_fault(split.trace, traced, gradients)
    names = [name for name, _ in runs.model.named_modules()]
    mine = [float(fault.order), float(names.index(fault.module)), *fault.difference.numbers]
    shown = (loss, logits, gradient)
    for x in shown:
        mine += (0.0, 0.0, 0.0) if x is None else x.numbers
    every = runs.agreed(mine)
    merged = [
        None if x is None else max((Difference(*row[n : n + 3]) for row in every), key=_excess)
        for n, x in zip((5, 8, 11), shown, strict=True)
    ]
    report = VerifyReport(merged[0], merged[1], merged[2], len({key[0] for key in traced}))
    if report.logits is None and report.loss is None:
        raise ValueError(
            f"verify: {name_of(runs.inner)} returns neither a loss nor outputs of tokens that could be "
            f"compared; give it labels"
        )
    if report.logits is not None and report.logits.limit >= 1:
        raise ValueError(
            f"verify: two whole runs of {name_of(runs.inner)} differ so much that nothing can be told of a "
            f"split one ({report}): give a batch without padding, of which it may read what has no "
            f"meaning, or the model in float32"
        )
    if all(x is None or x.is_within for x in merged):
        return report
    order, index, *numbers = min(every)[:5]
    raise WrongResultError(
        _words(runs, names[int(index)], int(order), Difference(*numbers), report)
    )


def _words(
    runs: _Runs, module: str, order: int, difference: Difference, report: VerifyReport
) -> str:
    part = runs.model.get_submodule(module)
    name = f"{module} ({name_of(part)})" if module else name_of(part)
    where = f"the first module whose output differs is {name}, by {difference} of its size"
    if order >= _OF_ROOT:
        where = (
            f"the outputs of its modules agree, and {name} makes another loss or gradient of them"
        )
    elif order >= _OF_GRADIENTS:
        where = (
            f"the outputs of its modules agree; the first gradient that differs, in the order of the "
            f"backward, is of {name}, by {difference} of its size"
        )
    return (
        f"verify: {name_of(runs.inner)}, split over {runs.ring.size} ranks, does not compute what it does "
        f"whole: {where}. {report}. A module that mixes tokens by other means than attention needs the "
        f"whole sequence: ContextParallel.unshard joins it, and shard splits what it returns"
    )


#: Where faults stand that no output shows: behind those that one does.
_OF_GRADIENTS, _OF_ROOT = 1 << 40, 1 << 41


def _first_fault(
    split: Trace, traced: Mapping[Key, Difference], gradients: Mapping[str, Difference]
) -> _Fault:
    """Find what to blame if anything is wrong.

    It is the module of the first record that differs; else the one whose gradients are the first
    in the order of the backward; else the model itself, as where all gradients differ.
    """
    for order, (key, difference) in enumerate(traced.items()):
        if not difference.is_within:
            return _Fault(order, split.records[key].module, difference)
    wrong = {name: x for name, x in gradients.items() if not x.is_within}
    if wrong and len(wrong) < len(gradients):
        returns = {name: n for n, name in enumerate(split.calls)}
        last = max(wrong, key=lambda name: returns.get(name.rpartition(".")[0], -1))
        return _Fault(_OF_GRADIENTS, last.rpartition(".")[0], wrong[last])
    return _Fault(_OF_ROOT, "", Difference(0.0, 0.0, 0.0))


def _of_loss(
    results: tuple[_Run, _Run, _Run], logits: Difference | None, runs: _Runs
) -> Difference | None:
    """Return the difference of losses, relative to the whole one's.

    The noise of a single number may be small by chance, so that of logits counts as well, as the
    mean over tokens lessens it.
    """
    losses = [x.loss for x in results]
    if None in losses:
        return None
    split, whole, other = (float(x) for x in losses if x is not None)
    size, mean = max(abs(whole), 1e-30), float(runs.sequences[-1].real.sum()) ** -0.5
    noise = abs(other - whole) / size
    if logits is not None:
        noise = max(noise, logits.noise * mean)
    floor = max(results[1].trace.floor * mean, LEAST_FLOOR)
    return Difference.of(abs(split - whole) / size, noise, floor)


def _of_gradients(
    errors: Tensor, noise: Tensor, sizes: Tensor, runs: _Runs, floor: float
) -> dict[str, Difference]:
    """Return the differences of parameters' gradients, relative to their sizes.

    What is far below a typical gradient counts as zero, which it is but for rounding: that of a
    bias of keys, say.
    """
    numels = torch.tensor([x.numel() for x in runs.parameters.values()]).to(sizes)
    if not len(numels):
        return {}
    typical = (sizes.square().sum() / numels.sum()).sqrt() * numels.sqrt()
    sizes = sizes.maximum(_SMALL_GRADIENT * typical).clamp(min=1e-300)
    common = (noise.square().sum() / sizes.square().sum()).sqrt()
    noise = (noise / sizes).maximum(common)
    rows = torch.stack([errors / sizes, noise], dim=1).tolist()
    return {
        name: Difference.of(error, noisy, floor)
        for name, (error, noisy) in zip(runs.parameters, rows, strict=True)
    }


def _excess(x: Difference) -> float:
    return x.error / x.limit


def _worst(differences: list[Difference]) -> int | None:
    if not differences:
        return None
    return max(range(len(differences)), key=lambda n: _excess(differences[n]))


def _sequences(hooks: ModelHooks, batch: Mapping[str, Any]) -> Iterator[Tokens]:
    """Yield the sequences of a batch: one, or an encoder's and a decoder's."""
    sharding = hooks.sharding
    for names in _SEQUENCES:
        given = [batch.get(name) for name in names]
        tokens = given[0] if given[0] is not None else given[1]
        if tokens is None and names is _SEQUENCES[-1] and hooks.is_pair:
            tokens = batch.get("labels")
        if tokens is None:
            continue
        length, device = tokens.shape[1], tokens.device
        padded = length + -length % divisor_of(sharding.layout_name, sharding.ring.size)
        positions = sharding.positions(padded, device=device)
        held = (positions < length).nonzero().flatten()
        real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=device)
        if given[2] is not None:
            real &= given[2] != 0
        yield Tokens(length, len(positions), positions[held], held, real)


def _check_batch(batch: object) -> None:
    """Refuse batches that a whole model cannot be given as they are."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch must be a mapping of names to tensors, got {type(batch).__name__}")
    tokens = tokens_of(batch)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ValueError("verify: batch must have input_ids [B, T] or inputs_embeds [B, T, dim]")
    mask = batch.get("attention_mask")
    numbers = isinstance(mask, Tensor) and mask.ndim == 2 and int(mask.max()) > 1
    if found := sorted({*STATED} & {name for name, x in batch.items() if x is not None}):
        raise UnsupportedError(_DOCUMENTS.format(", ".join(found)))
    if numbers:
        raise UnsupportedError(_DOCUMENTS.format("attention_mask that numbers documents"))


_DOCUMENTS = (
    "verify: {}: a whole model with attention of transformers is not told of documents so; give "
    "position_ids that start again, and no attention_mask"
)


def _check_wrappers(model: nn.Module) -> None:
    is_flat = any(getattr(x, "_fsdp_flattened", False) for x in model.parameters())
    if is_flat or any(isinstance(x, FullyShardedDataParallel) for x in model.modules()):
        raise UnsupportedError(
            "verify: the model is in FullyShardedDataParallel, whose parameters its parts cannot run "
            "with; verify it before it is wrapped, or use fully_shard"
        )


class _Fields:
    """Attributes, hooks and buffers of a model's modules, and its configs, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self._public = [(x, _public(x)) for x in modules]
        configs = {id(x): x for part in modules for x in _configs(part)}
        self._configs = [(x, dict(vars(x))) for x in configs.values()]
        self._dicts = [(vars(x)[name], dict(vars(x)[name])) for x in modules for name in _DICTS]

    def put_back(self) -> None:
        """Put them back. Hooks that others have registered since then stay, after the rest."""
        for owner, before in self._public:
            for name in _public(owner).keys() - before.keys():
                del vars(owner)[name]
            vars(owner).update(before)
        for config, before in self._configs:
            vars(config).clear()
            vars(config).update(before)
        for current, before in self._dicts:
            more = {key: x for key, x in current.items() if key not in before}
            current.clear()
            current.update(before | more)


def _public(module: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in vars(module).items() if not name.startswith("_")}


def _configs(module: nn.Module) -> Iterator[Any]:
    """Yield the config of a module, and those in it."""
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        yield config
        yield from (x for x in vars(config).values() if hasattr(x, "to_dict"))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Run a model without dropout and with gradients, and leave nothing changed.

    Layers that are computed again in the backward are so here as well: these are in training mode,
    with their rates of dropout set to zero.
    """
    fields = _Fields(model)
    buffers = [(x, x.clone()) for x in model.buffers()]
    weights = [*model.parameters()]
    gradients = [x.grad for x in weights]
    # Hooks may step an optimizer. Torch has no other name for them.
    hooks = [x._post_accumulate_grad_hooks or {} for x in weights]  # noqa: SLF001
    own_hooks = [dict(x) for x in hooks]
    devices = {x.device for x in weights if x.device.type not in ("cpu", "meta")}
    kind = next((x.type for x in devices), "cuda")
    try:
        with (
            torch.random.fork_rng([x.index for x in devices], device_type=kind),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            torch.default_generator.manual_seed(0)  # ranks compare what they draw
            for weight, its_hooks in zip(weights, hooks, strict=True):
                weight.grad = None
                its_hooks.clear()
            for module in model.modules():
                _switch_off_dropout(module)
            yield
    finally:
        fields.put_back()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for weight, gradient, its_hooks, own in zip(
            weights, gradients, hooks, own_hooks, strict=True
        ):
            weight.grad = gradient
            its_hooks.update(own)


def _switch_off_dropout(module: nn.Module) -> None:
    module.training = bool(getattr(module, "gradient_checkpointing", False))
    for name, rate in _public(module).items() if module.training else ():
        if "drop" in name and isinstance(rate, float):
            setattr(module, name, 0.0)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's, or the host's, memory was too small."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(
        error
    )


def _device_of(ring: Ranks) -> torch.device:
    """Return where a group's numbers have to be."""
    is_nccl = ring.group is not None and dist.get_backend(ring.group) == "nccl"
    return torch.device("cuda" if is_nccl else "cpu")


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def warn_of_untested(model: nn.Module) -> None:
    """Warn of a model that no test has run: of another package, or of a newer transformers."""
    cls = next(x for x in type(model).__mro__ if not x.__module__.startswith("torch."))
    newest = _release(TESTED_RELEASES[-1])
    reason = ""
    if not cls.__module__.startswith("transformers."):
        reason = f"its code is of {cls.__module__}, not of transformers"
    elif _release(installed_release()) > newest:
        reason = f"transformers is {installed_release()}, and tests run up to {TESTED_RELEASES[-1]}"
    if reason:
        warnings.warn(
            f"no test has run {cls.__name__} on a ring ({reason}): call ring_torch.hf.verify(model, "
            f"cp, batch) once with a short batch, or verify(batch) of the handle",
            stacklevel=3,
        )


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor of a version."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])
