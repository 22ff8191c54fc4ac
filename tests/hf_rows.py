"""Rows of a table of models, batches and options: each is run whole and split, and compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_models import (
    LENGTH,
    WHOLE,
    Wide,
    build,
    difference,
    differences_of_gradients,
    gradients,
    in_training,
    whole,
)
from on_ranks import end_groups, of_first_rank
from sweep.compare import batch_of, image_batch
from sweep.tiny import VOCAB
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from ring_core import LayoutSpec
from ring_torch import ContextParallel, hf

Batch = dict[str, Any]
#: Layout, strategy, and the number of ranks of a ring: 0 for all.
Ring = tuple[LayoutSpec, Any, int]
#: Largest errors, relative to the largest entry: in float64, and where a model runs in float32.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4}


#: A model of each family whose recurrent layers are split, and those without attention, which take
#: no positions.
FAMILIES = (
    "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM OlmoHybridForCausalLM"
    " KimiLinearForCausalLM BailingHybridForCausalLM BambaForCausalLM FalconH1ForCausalLM"
    " GraniteMoeHybridForCausalLM NemotronHForCausalLM Zamba2ForCausalLM JambaForCausalLM"
    " Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM MiniMaxForCausalLM RecurrentGemmaForCausalLM"
)
SCANS_ALONE = "Mamba2ForCausalLM MambaForCausalLM FalconMambaForCausalLM"


class Case(NamedTuple):
    """Micro-batches of a step, as a split model is given them and as a whole one is.

    Attributes:
        split: Whole batches, for ``hf.parallelize`` or ``hf.shard_batch``.
        whole: What one process computes instead: as many, or each document alone.
        way: ``accumulated`` one after another, ``both`` losses in one backward, or ``crossed``:
            all forwards before the first backward.
        shares: What each loss counts; 1 if empty.
    """

    split: list[Batch]
    whole: list[Batch]
    way: str = "accumulated"
    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """A model with a batch, and how it is split.

    Attributes:
        model: Name for :func:`hf_models.build`.
        batch: Name of :data:`BATCHES`.
        rings: Rings that run it, one after another.
        by: ``parallelize``, or ``shard_batch``.
        options: Options of ``hf.parallelize``.
        changes: Changes of the model's config.
        unlike: Changes of a config with another loss, so what ``changes`` has beside has an effect.
        form: ``checkpointed``, ``reentrant`` or ``compiled`` (in float32), ``ddp`` or ``fsdp``.
        trains: True in training mode, where layers call fused functions first.
        prepare: What changes a built model, and returns it.
        ranks: Number of processes.
    """

    model: str
    batch: str
    rings: Sequence[Ring] = (("zigzag", "auto", 0),)
    by: str = "parallelize"
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    unlike: Mapping[str, Any] | None = None
    form: str = ""
    trains: bool = False
    prepare: Callable[[Any], Any] | None = None
    ranks: int = 2


def rows(
    models: str, batches: str, *, daily: str | None = None, refused: str | None = None,
    forms: Sequence[str] = ("",), suffix: str = "", **fields: Any,
) -> Iterator[Any]:  # fmt: skip
    """Yield parameters of a test: a row for each of models, batches and forms.

    Args:
        models: Names, separated by spaces.
        batches: Names, separated by commas.
        daily: The ids that run for each change, separated by commas; all without.
        refused: Beginnings of ids that transformers 5.14 refuses, separated by spaces; "" for all.
        forms: As of :class:`Row`.
        suffix: The end of their ids.
        **fields: Other fields of all rows.
    """
    ids, of_change = set(), None if daily is None else {*filter(None, daily.split(", "))}
    beginnings = () if refused is None else tuple(refused.split(" "))
    for model, batch, form in product(models.split(), batches.split(", "), forms):
        ids.add(name := "-".join(filter(None, (model, batch, form, suffix))))
        is_daily = of_change is None or name in of_change
        marks = [] if is_daily else [pytest.mark.nightly]
        marks += [pytest.mark.refused_in("5.14")] if name.startswith(beginnings) else []
        row = Row(model, batch, form=form, **{"trains": bool(form), **fields})
        yield pytest.param(row, id=name, marks=marks)
    assert (of_change or set()) <= ids, of_change


def on(ranks: int, *layouts: LayoutSpec, strategy: Any = "auto") -> tuple[Ring, ...]:
    """Return rings of so many ranks, 0 for all, with these layouts."""
    return tuple((layout, strategy, ranks) for layout in layouts)


def padded(
    length: int, hidden: Iterable[int] = (), *, seed: int = 3, rows: str = "equal", count: int = 2,
    token: int | None = None, shifted: bool = True,
) -> Batch:  # fmt: skip
    """Return a batch with padding at these indices; without any it has no attention mask.

    Labels of padding, and where they are shifted those predicted by padding, are ignored.

    Args:
        length: Tokens of a row.
        hidden: Indices of padding: of both rows if these are ``equal``, three further in the second
            if they are ``unlike``, or of the ``first`` alone.
        seed: Of tokens.
        rows: ``equal``, ``unlike`` or ``first``.
        count: Number of rows.
        token: The padding token; without it padding has tokens like others.
        shifted: True if label ``i`` is predicted by token ``i - 1``.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 40, (count, length), generator=generator)
    if not (hidden := [*hidden]):
        return {"input_ids": tokens, "labels": tokens}
    mask = torch.ones_like(tokens)
    mask[0 if rows == "first" else slice(None), hidden] = 0
    mask = torch.stack([mask[0], mask[0].roll(3)]) if rows == "unlike" else mask
    tokens = tokens if token is None else tokens.masked_fill(mask == 0, token)
    labels = tokens.masked_fill(mask == 0, -100)
    if shifted:
        labels[:, 1:][mask[:, :-1] == 0] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def pair_of(source: Batch, target: Batch) -> Batch:
    """Return a batch of an encoder's and a decoder's sequence, of different lengths."""
    both = {f"decoder_{name}": x for name, x in target.items() if name != "labels"}
    return {n: x for n, x in source.items() if n != "labels"} | both | {"labels": target["labels"]}


#: Indices of padding tokens among 23.
PADDING = {
    "left": [*range(6)], "right": [*range(17, 23)], "both": [*range(4), *range(20, 23)],
    "hole": [9, 10, 11, 12], "two holes": [5, 12, 13, 14, 22], "every third": [*range(2, 23, 3)],
}  # fmt: skip


def paddings(model: Any, kind: str) -> Iterator[Batch]:
    """Yield a batch for each of :data:`PADDING`; of the ``first`` row alone, others beside.

    These have padding on no side, or embeddings in place of tokens.
    """
    shifted, token = "CausalLM" in type(model).__name__, model.config.pad_token_id or 0
    for hidden in PADDING.values() if kind != "first" else ((), PADDING["left"], PADDING["right"]):
        batch = padded(23, hidden, rows=kind, shifted=shifted, token=token)
        if model.config.is_encoder_decoder:
            source = {name: batch[name].flip(1)[:, 3:] for name in ("input_ids", "attention_mask")}
            batch = pair_of(source, batch)
        yield batch
    if kind == "first":
        tokens = batch["input_ids"]
        embeddings = model.get_input_embeddings()(tokens).detach()
        yield {"inputs_embeds": embeddings, "labels": tokens}


def two(model: Any, kind: str) -> Case:
    """Return two micro-batches of different shapes and paddings."""
    first = padded(27, range(6), seed=1, rows="first")
    second = padded(18, range(13, 18), seed=2, count=1)
    if model.config.is_encoder_decoder:
        sources = padded(15, range(8, 15), seed=3, rows="first"), padded(22, seed=4, count=1)
        first, second = (pair_of(s, t) for s, t in zip(sources, (first, second), strict=True))
        for batch in (first, second):
            batch["decoder_input_ids"] = batch["decoder_input_ids"].roll(1, dims=1)
    if getattr(model.config, "vision_config", None) is not None:
        first = images(model, "plain")
    return Case([first, second], [first | WHOLE, second | WHOLE], kind, (2, 1))


def pair(_: Any, kind: str) -> Batch:
    """Return a batch whose decoder's tokens are made of labels."""
    batch = whole("plain")
    tokens = batch["input_ids"].clamp(min=4)
    source = tokens[:, : LENGTH - 12]
    out = {"input_ids": source, "labels": batch["labels"].where(batch["labels"] < 0, tokens)}
    if kind == "padded":
        real = torch.arange(source.shape[1]) < torch.tensor([[9], [source.shape[1]]])
        out["attention_mask"] = real.long()
    return out


def images(model: Any, kind: str) -> Batch:
    """Return a batch with an image in each row, padded or of several documents."""
    with widened(model):
        batch = image_batch(model, batch_of(model))
    assert batch is not None
    tokens = batch["input_ids"]
    batch["labels"] = tokens.where(tokens < VOCAB - 16, -100)
    if kind == "left":
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][0, :2] = 0
        batch["labels"][0, :3] = -100
    if kind == "packed":  # text positions of two documents, in three dimensions
        positions = torch.cat([torch.arange(9), torch.arange(12)]).expand(2, -1)
        directions = torch.stack([positions, positions // 2, positions % 3])
        batch["position_ids"] = torch.cat([positions[None], directions])
    return batch


def tagged(model: Any, kind: str) -> Batch:
    """Return labels that are not shifted; for ``first`` a rank of a contiguous layout has none.

    ESM's tokens have its mask among them, more of it on one of two ranks.
    """
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(4, 40, (2, 23), generator=generator)
    classes = min(model.config.num_labels if "Token" in type(model).__name__ else 40, 40)
    labels = torch.randint(classes, (2, 23), generator=generator)
    hidden = torch.rand(tokens.shape, generator=generator) < 0.7
    batch = {"input_ids": tokens}
    if model.config.model_type == "esm":
        tokens[:, 9:13] = 5
    if kind == "first":
        hidden[:, 5:] = True
    if kind == "padded":
        real = torch.arange(23) < torch.tensor([[14], [23]])
        hidden, batch["attention_mask"] = hidden | ~real, real.long()
    return batch | {"labels": labels.masked_fill(hidden, -100)}


def alone(batch: Batch) -> list[Batch]:
    """Return each document of a packed batch as a batch of its own, with its part of the loss."""
    labels = pad(batch["labels"][:, 1:], (0, 1), value=-100)
    count, documents = int((labels != -100).sum()), []
    for row, positions in enumerate(batch["position_ids"]):
        bounds = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in pairwise(bounds):
            own = labels[row : row + 1, start:end]
            part = {"input_ids": batch["input_ids"][row : row + 1, start:end], "labels": own}
            documents.append(part | {"shift_labels": own, "num_items_in_batch": count} | WHOLE)
    return documents


def documents(_: Any, kind: str) -> Case:
    """Return packed documents, stated in some way, and each of them alone."""
    batch = whole("flattened" if kind in ("cu_seq_lens", "attention_mask") else "packed")
    expected = alone(batch)
    numbers = (batch["position_ids"] == 0).cumsum(1)
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), LENGTH]
    if kind != "position_ids":
        del batch["position_ids"]
        offsets = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(starts))
        batch |= offsets if kind == "cu_seq_lens" else {kind: numbers}
    return Case([batch], expected)


def between_padding(_: Any) -> Case:
    """Return numbered documents with padding between them, each of which is computed alone."""
    batch = whole("packed")
    mask = torch.zeros_like(batch["input_ids"])
    for row, start, end, number in ((0, 3, 9, 1), (0, 12, 30, 2), (1, 0, 20, 1), (1, 20, 43, 2)):
        mask[row, start:end] = number
    first = pad(mask.diff(dim=1), (1, 0), value=1) != 0
    positions = torch.arange(LENGTH).expand(2, -1)
    begun = torch.where(first, positions, 0).cummax(1).values
    own = {"input_ids": batch["input_ids"], "attention_mask": mask}
    own["labels"] = batch["labels"].masked_fill((mask == 0) | first, -100)
    # What is padding has no label, and is a document of its own to the whole model.
    return Case([own], alone(own | {"position_ids": positions - begun}))


def row(length: int = LENGTH, **more: Tensor) -> Batch:
    """Return one row of tokens, with labels."""
    return padded(length, seed=length, count=1) | more


def invoked(_: Any) -> Iterator[Batch]:
    """Yield tokens that invoke activated LoRA, by themselves and by offsets.

    Invocations end a row, lie across a border, come twice, are only begun, and are missing.
    """
    tokens = torch.arange(5 * LENGTH).view(5, -1) % 58 + 3
    for n, starts in enumerate(([LENGTH - 2], [21], [4, 30], [])):
        for start in starts:
            tokens[n, start : start + 2] = torch.tensor([1, 2])
    tokens[3, 9] = tokens[4, LENGTH - 1] = 1
    yield {"input_ids": tokens, "labels": tokens}
    yield {"input_ids": tokens, "labels": tokens, "alora_offsets": [1, 0, None, LENGTH, 9]}


def _kinds(function: Callable[..., Any], kinds: str, before: str = "") -> dict[str, Any]:
    return {f"{before}{kind}": partial(function, kind=kind) for kind in kinds.split(", ")}


#: Batches by name: what makes a case or batches for a model; these run one after another.
BATCHES: dict[str, Callable[[Any], Case | Batch | Iterable[Batch]]] = {
    **_kinds(lambda _, kind: whole(kind), "plain, right, left, packed, flattened"),
    **_kinds(pair, "plain, padded", "pair "), **_kinds(images, "plain, left, packed", "images "),
    **_kinds(two, "both, crossed, accumulated"), **_kinds(paddings, "equal, unlike, first"),
    **_kinds(tagged, "plain, first, padded", "tagged "), "invoked": invoked,
    "between padding": between_padding, **_kinds(documents, "position_ids, seq_idx, cu_seq_lens, attention_mask", "by "),
    "two tokens": lambda _: {"input_ids": torch.tensor([[5, 9]]), "labels": torch.tensor([[5, 9]])},
    "three tokens": lambda _: padded(3), "row": lambda _: row(),
    "short rows": lambda _: (row(15), row(position_ids=torch.arange(LENGTH)[None] % 11)),
    "row and packed": lambda _: (row(), row(position_ids=torch.arange(LENGTH)[None] % 38)),
    "row and images": lambda model: (row(), images(model, "plain")),
    "row and pair": lambda _: pair_of(row(), row(31)),
    "lengths": lambda _: map(row, (LENGTH, 9, 16, 30, 38, 39)),
}  # fmt: skip


def activated(model: Any) -> Any:
    """Return a model with adapters that begin where tokens invoke them, in the whole sequence."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False,
        alora_invocation_tokens=[1, 2],
    )  # fmt: skip
    torch.manual_seed(0)
    return get_peft_model(model.float(), config).double()


def cases_of(model: Any, name: str) -> list[Case]:
    """Return the cases of a batch for a model."""
    made = BATCHES[name](model)
    if isinstance(made, Case):
        return [made]
    return [Case([x], [x | WHOLE]) for x in ([made] if isinstance(made, dict) else made)]


def built(x: Row, changes: Mapping[str, Any]) -> Any:
    """Build the model of a row."""
    model = build(x.model, **changes)
    model = x.prepare(model) if x.prepare is not None else model
    model = in_training(model) if x.trains else model
    if x.form == "compiled":  # without ``Wide``, which would be compiled, too
        model.float()
    if x.form in ("checkpointed", "reentrant"):  # recomputed layers run outside of ``Wide``
        model.float().config.get_text_config().use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": x.form == "reentrant"})
    return model


Result = tuple[Tensor, list[Tensor], dict[str, Tensor]]


def widened(model: Any) -> AbstractContextManager[Any]:
    """Keep all in float64, if the model's weights are."""
    return Wide() if next(model.parameters()).dtype == torch.float64 else nullcontext()


def result(model: Any, batches: Sequence[Batch], case: Case, call: Any = None) -> Result:
    """Return the loss of micro-batches, the logits of each, and gradients."""
    model.zero_grad()
    total, losses, logits = torch.zeros((), dtype=torch.float64), [], []
    with widened(model):
        for share, batch in zip(case.shares or [1] * len(batches), batches, strict=True):
            out = (model if call is None else call)(**batch)
            losses.append(share * out.loss)
            total += losses[-1].detach()
            logits += [] if out.logits is None else [out.logits.detach()]
            if case.way == "accumulated" and losses[-1].requires_grad:
                losses[-1].backward()
        if case.way == "both":
            sum(losses).backward()
        elif case.way == "crossed":
            for loss in losses:
                loss.backward()
    return total, logits, gradients(model)


def summed(model: Any, case: Case, cp: ContextParallel) -> Result:
    """Return the results of a parallelized model, with the gradients of all ranks."""
    loss, logits, _ = result(model, case.split, case)
    cp.reduce_gradients(model)
    return loss, logits, gradients(model)


def check(
    actual: Result, expected: Result, case: Case, what: str, cp: ContextParallel | None = None
) -> None:
    """Compare losses, logits of real tokens, and gradients; a missing gradient counts as zeros.

    Logits are parts of those of the ring ``cp``, if it is given.
    """
    (loss, logits, grads), (whole_loss, whole_logits, whole_grads) = actual, expected
    limit = LIMITS[next(iter(whole_grads.values())).dtype]
    differences = {"loss": difference(loss, whole_loss, limit)}
    if len(whole_logits) > len(logits) > 0:  # those of each document
        whole_logits = [torch.cat(whole_logits, 1).view(len(case.split[0]["labels"]), LENGTH, -1)]
    for batch, own, like in zip(case.split, logits, whole_logits, strict=len(logits) == 1):
        local = own if cp is None else cp.unshard(own)[:, : like.shape[1]]
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        real = mask != 0 if mask is not None and mask.shape == like.shape[:2] else ...
        differences[f"logits of {[*batch]}"] = difference(local[real], like[real], limit)
    largest = max(float(x.abs().max()) for x in whole_grads.values())
    differences |= differences_of_gradients(grads, whole_grads, limit, 1e-3 * largest)
    wrong = {name: text for name, text in differences.items() if text}
    assert not wrong, f"{what}: {wrong}"


def compared(rank: int, x: Row) -> None:
    """Run a row on this rank, whole and split over each of its rings, and compare."""
    end_groups()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    model = built(x, x.changes)
    cases = cases_of(model, x.batch)
    serial = [case._replace(way="accumulated") for case in cases]
    whole_model = deepcopy(model)
    expected: list[Result] = of_first_rank(
        lambda: [result(whole_model, case.whole, case) for case in serial]
    )
    other = x.unlike is not None and rank == x.ranks - 1
    loss = result(built(x, x.unlike), cases[0].whole, serial[0])[0] if other else None  # type: ignore[arg-type]
    assert loss is None or not torch.equal(loss, expected[0][0]), f"{x.changes} have no effect"
    if "images" in x.batch:
        assert any("vis" in n and y.any() for n, y in expected[-1][2].items()), "of no image"
    is_few = any(0 < size < x.ranks for *_, size in x.rings)
    pairs: list[Any] = [dist.new_group([n, n + 1]) for n in range(0, x.ranks, 2) if is_few]
    for number, (layout, strategy, size) in enumerate(x.rings, 1):
        group, is_last = pairs[rank // 2] if 0 < size < x.ranks else None, number == len(x.rings)
        cp, what = ContextParallel(group, layout=layout), f"{layout} {strategy} on {size}"
        if x.by == "shard_batch":
            name = strategy if isinstance(strategy, str) else "groups"
            model.set_attn_implementation(hf.register(f"ring_{name}", strategy=strategy))
            for case, like in zip(cases, expected, strict=True):
                shards = [hf.shard_batch(cp, batch, model=model) for batch in case.split]
                loss, logits, _ = result(model, shards, case)
                dist.all_reduce(loss, group=group)
                check((loss, logits, reduced(model, cp, x)), like, case, what, cp)
            continue
        outer, keys = wrapped(model, x.form), [*model.state_dict()]
        handle = hf.parallelize(outer, cp, **x.options)
        assert [*model.state_dict()] == keys
        assert "strategy" not in x.options or "ring-" in model.config._attn_implementation
        call = torch.compile(model, backend="eager") if x.form == "compiled" else outer
        local = None if x.options.get("logits") == "gather" else cp
        steps = [*zip(cases, expected, strict=True)]
        # Another call finds what one has left.
        for case, like in steps if len(steps) > 1 or not is_last else steps * 2:
            loss, logits, _ = result(model, case.split, case, call)
            check((loss, logits, reduced(model, cp, x)), like, case, what, local)
            assert not logits or x.options.get("logits") != "none"
        # Verification refuses several documents of layers that carry states over them when whole.
        if x.options.get("logits") == "none" and x.options.get("recurrent") != "split":
            with widened(model):
                handle.verify(cases[-1].split[0])
        handle.remove()
        if not x.form and is_last and rank == 0:
            last = result(model, cases[-1].whole, serial[-1])
            check(last, expected[-1], serial[-1], "after remove()")


def wrapped(model: Any, form: str) -> Any:
    """Wrap a model for data parallelism, if its form is one of that."""
    if form == "fsdp":
        for layer in (*model.model.layers, model):
            fully_shard(layer)
    return DistributedDataParallel(model) if form == "ddp" else model


def reduced(model: Any, cp: ContextParallel, x: Row) -> dict[str, Tensor]:
    """Return the whole sequence's gradients, added, or averaged as a wrapper does."""
    if x.form not in ("ddp", "fsdp"):
        reduce(model, cp, x.options.get("reduction", "sum"))
    grads = gradients(model)
    return {n: y.full_tensor() if isinstance(y, DTensor) else y for n, y in grads.items()}


def reduce(model: Any, cp: ContextParallel, reduction: str) -> None:
    """Add gradients over the ranks, or average them."""
    if reduction == "sum":
        cp.reduce_gradients(model)
        return
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= cp.cp_size
