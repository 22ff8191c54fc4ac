"""``generate`` of a parallelized model, over a cache that is spread over the ranks.

A forward of ``generate`` is run in parts. All tokens of a prompt but those whose logits are asked
for are split over the ranks, as in training, and their logits are not made. The others every rank
computes: so does every step of decoding. All ranks then take the logits of rank 0, so that they
choose the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_core import Layout, UnsupportedError
from ring_core.base.arguments import not_none
from ring_torch.comm.exchange import collective
from ring_torch.comm.store import CallSignature
from ring_torch.context import check_context
from ring_torch.hf.cached import ServedMask, ShardedCache, Step
from ring_torch.hf.models.check import text_modules
from ring_torch.hf.models.classes import CACHES, eager_attention_spec, name_of
from ring_torch.hf.models.code import by_name, parameters_of
from ring_torch.hf.models.hooks import ModelHooks, refuse_generation, replace_attribute
from ring_torch.hf.models.recurrent import is_recurrent
from ring_torch.hf.models.rope import depends_on_length
from ring_torch.sharding import agree_on_call

#: Options of ``generate`` that end it on each rank by itself.
_BY_RANK = ("max_time", "synced_gpus")
#: Arguments of a forward that are not served, and tensors that are.
_REFUSED = ("output_attentions", "output_hidden_states")
_TENSORS = ("input_ids", "attention_mask", "position_ids", "logits_to_keep", "cache_position")


def serving_generate(model: Any, hooks: ModelHooks) -> Callable[..., Any]:
    """Return what stands for ``generate`` of a parallelized model.

    It serves a :class:`ShardedCache`, under either of its names, and refuses any other cache.
    """

    @wraps(type(model).generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        name = next((x for x in sorted(CACHES) if kwargs.get(x) is not None), None)
        cache = kwargs.pop(name, None) if name else None
        if not isinstance(cache, ShardedCache):
            refuse_generation()
        _check(model, hooks, cache, kwargs)
        # Models call it `cache` from transformers 5.24 on.
        own = next(iter(CACHES & parameters_of(type(model))), "past_key_values")
        cache.num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        cache.expected = _expected(model, args, kwargs)
        cache.is_new = True
        with _serving(model, hooks, cache):
            return type(model).generate(model, *args, **{own: cache}, **kwargs)

    return generate


def _check(model: Any, hooks: ModelHooks, cache: ShardedCache, kwargs: dict[str, Any]) -> None:
    """Refuse models and options that a sharded cache cannot serve, before anything is sent.

    Raises:
        ValueError: The cache is of other ranks.
        UnsupportedError: The model, or an option, is not served.
    """
    if check_context(cache.cp, acting=False) is not hooks.all_ranks:
        raise ValueError(
            "the ShardedCache was made with another ContextParallel than hf.parallelize was called "
            "with: give both the same"
        )
    config = kwargs.get("generation_config") or model.generation_config
    asked = [x for x in _BY_RANK if kwargs.get(x) or getattr(config, x, None)]
    criteria = kwargs.get("stopping_criteria") or ()
    asked += ["max_time"] * any(type(x).__name__ == "MaxTimeCriteria" for x in criteria)
    if asked:
        raise UnsupportedError(
            f"{' and '.join(dict.fromkeys(asked))}: ranks would end at unlike tokens, by their own "
            f"clocks; leave it out, and give max_new_tokens"
        )
    reasons = [*_reasons(model, hooks)]
    if reasons:
        raise UnsupportedError(
            f"generate() of {name_of(model)} with a ShardedCache is not supported: "
            f"{'; '.join(dict.fromkeys(reasons))}"
        )


def _reasons(model: Any, hooks: ModelHooks) -> Iterator[str]:
    """Yield why a model is not served."""
    config = model.config.get_text_config(decoder=True)
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if unserved := sorted(kinds - {"full_attention", "sliding_attention"}):
        yield f"layers of type {', '.join(unserved)}"
    if hooks.is_pair or hooks.is_pooling:
        yield "it is no decoder alone"
    if hooks.takes_merged:
        yield "a model of text and images (take its language model)"
    if others := sorted({*hooks.report.hooks}):
        yield f"it needs hooks for {', '.join(others)}"
    for _, module in text_modules(model):
        name = type(module).__name__
        if is_recurrent(module):
            yield f"{name} is recurrent, and its state no cache of keys"
        if hasattr(module, "indexer") or "Indexer" in name:
            yield f"{name} has an indexer (DSA), which reads all keys"
        if hasattr(module, "expand_kv"):
            yield f"{name} caches latents, which it expands itself"
        if depends_on_length(module):
            yield f"{name} turns keys by the length of the sequence (dynamic or longrope)"
        if eager_attention_spec(module) is not None:
            yield f"{name} writes out its own attention"


def _expected(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the tokens that a row may have, as far as options tell; the cache grows beyond."""
    config = kwargs.get("generation_config") or model.generation_config
    inputs = next(
        (x for x in (kwargs.get("inputs"), kwargs.get("input_ids"), *args) if isinstance(x, Tensor)),
        None,
    )  # fmt: skip
    prompt = 0 if inputs is None else inputs.shape[1]
    new = kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    longest = kwargs.get("max_length") or getattr(config, "max_length", None)
    return prompt + int(new) if new else max(prompt, int(longest or 0))


@contextmanager
def _serving(model: nn.Module, hooks: ModelHooks, cache: ShardedCache) -> Iterator[None]:
    """Let forwards of a model be those of ``generate`` in a block: batches are not split."""
    with ExitStack() as undo:
        undo.callback(replace_attribute(hooks, "serves", True))
        forward = _Forward(model, hooks, cache)
        undo.callback(replace_attribute(model, "forward", wraps(model.forward)(forward)))
        yield


class _Forward:
    """The forward of a model during ``generate``.

    Args:
        model: The model.
        hooks: Its hooks.
        cache: The cache.
    """

    def __init__(self, model: nn.Module, hooks: ModelHooks, cache: ShardedCache) -> None:
        self.model, self.hooks, self.cache = model, hooks, cache
        self.inner = model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward in parts, and return the last one's output, with the logits of rank 0.

        Raises:
            UnsupportedError: An argument is not served.
            ValueError: Padding is not on the left.
            RankMismatchError: Ranks have other tokens, or their generators other states.
        """
        arguments = by_name(self.model, args, kwargs)
        refused = [x for x in _REFUSED if arguments.get(x) not in (None, False)]
        # Of other tensors it is not known which part belongs to which tokens.
        refused += [x for x, y in arguments.items() if isinstance(y, Tensor) and x not in _TENSORS]
        ids = arguments.get("input_ids")
        if refused or not isinstance(ids, Tensor):
            raise UnsupportedError(
                f"generate() with a ShardedCache takes input_ids alone, and got {', '.join(refused) or 'none'}"
            )
        self._agree(ids)
        rows, n = ids.shape
        cache, keep = self.cache, arguments.get("logits_to_keep", 1)
        if cache.rows and len(cache.rows) != rows:
            raise ValueError(
                f"the ShardedCache holds {len(cache.rows)} rows, and the batch has {rows}: call its reset(), "
                f"or make a new one"
            )
        cache.padding = self._padding(arguments.get("attention_mask"), rows, n)
        positions = arguments.get("position_ids")
        if positions is None:
            padding = torch.tensor(cache.padding, device=ids.device)[:, None]
            at = torch.arange(cache.length, cache.length + n, device=ids.device)
            positions = (at - padding).clamp(min=0)
        kept = keep if isinstance(keep, int) and 0 < keep < n else 1
        # Too few tokens to give each rank some are computed by all of them.
        first = n - kept if n - kept >= 2 * cache.cp.cp_size else 0
        for start in range(0, first, cache.chunk):
            self._run(
                arguments, ids, positions, range(start, min(start + cache.chunk, first)), None
            )
        output = self._run(arguments, ids, positions, range(first, n), keep)
        output["logits"] = self._of_first_rank(output["logits"])
        return output

    def _run(
        self, arguments: dict[str, Any], ids: Tensor, positions: Tensor, part: range, keep: Any
    ) -> Any:
        """Run a part of the tokens: if ``keep`` is none split over the ranks, without logits."""
        cache, sharding = self.cache, self.hooks.sharding
        rows = torch.arange(part.start, part.stop, device="cpu")
        is_split = keep is None
        if is_split:
            layout = Layout.padded(sharding.layout, len(part), sharding.ranks.size)
            local = torch.as_tensor(layout.positions(sharding.ranks.rank), device="cpu")
            # Rows of padding repeat the last token, and nobody sees them.
            rows = rows[local.clamp(max=len(part) - 1)]
        rows = rows.to(ids.device)
        end = cache.length + len(part)
        new = tuple(min(len(part), max(0, end - padding)) for padding in cache.padding)
        step = cache.step = Step(cache, new, len(part), is_split)
        inner = {
            **arguments, "input_ids": ids[:, rows], "position_ids": positions[..., rows],
            "attention_mask": ServedMask(step, (len(ids), len(rows))), "use_cache": True,
            next(iter(CACHES & arguments.keys())): cache,
        }  # fmt: skip
        inner.pop("cache_position", None)  # of all tokens, which a model finds itself
        if "logits_to_keep" in parameters_of(type(self.model)):
            # One row, which is thrown away, if there are no logits to be made.
            inner["logits_to_keep"] = 1 if is_split else keep
        try:
            output = self.inner(**inner)
            cache.length = end
        finally:
            cache.step = None
            if cache.length != end:  # some layers may have their keys, and others not
                cache.crop(0)
        return output

    def _agree(self, ids: Tensor) -> None:
        """Compare tokens with the other ranks', and at first the states of random generators.

        Raises:
            RankMismatchError: They differ.
        """
        ranks, cache = self.hooks.sharding.ranks, self.cache
        number = ranks.next_call()
        text = ids.cpu().numpy().tobytes()
        what = "digest of input_ids"
        if cache.is_new:
            what = "digest of input_ids and of random generators (torch.manual_seed)"
            text += torch.get_rng_state().numpy().tobytes()
            if ids.is_cuda:
                text += torch.cuda.get_rng_state(ids.device).numpy().tobytes()
        cache.is_new = False
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        facts = {"rows": len(ids), "tokens": ids.shape[1], "length": cache.length, "seed_is": what}
        agree_on_call(ranks, number, CallSignature.of(facts, "generate"), ids.device, seed)

    def _padding(self, mask: Any, rows: int, n: int) -> tuple[int, ...]:
        """Return the padding of each row.

        Raises:
            ValueError: It is not before all tokens, or changes what is cached.
        """
        cache = self.cache
        if mask is None:
            return cache.padding if cache.rows else (0,) * rows
        length = cache.length + n
        if not isinstance(mask, Tensor) or mask.shape != (rows, length):
            raise UnsupportedError(
                f"generate() with a ShardedCache takes an attention_mask [{rows}, {length}], of cached and new "
                f"tokens, got {list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
            )
        seen = (mask != 0).cpu()
        padding = (~seen).sum(dim=1)
        if not torch.equal(seen, torch.arange(length, device="cpu") >= padding[:, None]) or bool(
            (padding >= length).any()
        ):
            raise ValueError(
                "attention_mask: padding has to be to the left of all tokens (padding_side='left' of the "
                "tokenizer), and a row needs a token"
            )
        found = tuple(padding.tolist())
        if cache.rows and found != cache.padding:
            raise ValueError(
                f"attention_mask says that rows begin with {found} tokens of padding, and the cache was "
                f"filled with {cache.padding}"
            )
        return found

    def _of_first_rank(self, logits: Tensor) -> Tensor:
        """Return the logits of rank 0, so that all ranks choose the same tokens."""
        ranks = self.hooks.sharding.ranks
        if ranks.size == 1:
            return logits
        sent = logits.detach().contiguous()
        collective(ranks, "logits", lambda: dist.broadcast(
            sent.view(-1).view(torch.uint8), group=not_none(ranks.group), group_src=0, async_op=True
        ))  # fmt: skip
        return sent
