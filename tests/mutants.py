"""Mutants: changes that break the backends on purpose, each of which a test must notice.

A mutant is a table of functions, as ``module:name``, with pieces of their source and what stands in
their place. Functions of packages that are not loaded stay as they are.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

from ring_core.plan import plan as _plan

Edits = dict[str, dict[str, str]]


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Apply a mutant while this context lasts."""
    if name is None:
        yield
        return
    _plan._make_plan.cache_clear()
    try:
        with changed(ALL[name]):
            yield
    finally:
        _plan._make_plan.cache_clear()


@contextmanager
def changed(functions: Edits) -> Iterator[None]:
    """Let functions of packages that are loaded run with pieces of their source replaced."""
    with ExitStack() as stack:
        for path, edits in functions.items():
            if path.partition(".")[0] in sys.modules:
                function, code = edited(path, edits)
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = code
        yield


def edited(path: str, edits: dict[str, str]) -> tuple[FunctionType, CodeType]:
    """Return a function, and its code with pieces of its source, each there once, replaced."""
    module, _, names = path.partition(":")
    function: Any = importlib.import_module(module)
    for name in names.split("."):
        function = inspect.getattr_static(function, name)
    function = inspect.unwrap(getattr(function, "__func__", function))  # the plain one
    if not isinstance(function, FunctionType):
        raise LookupError(f"{path} is no function")
    source = textwrap.dedent(inspect.getsource(function))
    for right, wrong in edits.items():
        if source.count(right) != 1:  # no AssertionError, which is what a mutant is to cause
            raise LookupError(f"{path} has not once {right!r}")
        source = source.replace(right, wrong)
    flags = function.__code__.co_flags & ANNOTATIONS
    code = compile(source, function.__code__.co_filename, "exec", flags=flags)
    return function, _code_of(function.__name__, code)


def _code_of(name: str, code: CodeType) -> CodeType:
    """Return the code of a function within that of its source."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    for x in inner:
        if x.co_name == name:
            return x
    return next(_code_of(name, x) for x in inner if x.co_name.startswith("<generic"))


ANNOTATIONS = importlib.import_module("__future__").annotations.compiler_flag
_LOG_2 = "0.6931471805599453"
_ITEMS, _HOME = "ring_core.programs.ring:RingProgram.items", "return self._items[rank][step]"
_STEP_TABLE, _GATHERED = (
    "ring_jax.rank_view:step_table",
    "ring_torch.transports.p2p:Messages.return_grads",
)
_TABLES, _MERGE = "ring_torch.strategies.ulysses:tables_of", "ring_torch.accumulate:merge_in_torch"

MUTANTS: dict[str, Edits] = {
    "window-off-by-one": {
        "ring_core.masks.band:local_band": {
            "left, right = band": "left, right = (None if band[0] is None else band[0] + 1), band[1]",
        },
    },
    "last-step-dropped": {
        _ITEMS: {_HOME: f"{_HOME} if step < self.num_steps - 1 or step == 0 else ()"},
        _STEP_TABLE: {
            'live = column["q_stop"] > column["q_start"]':
            'live = (column["q_stop"] > column["q_start"]) & (step < program.num_steps - 1 or step == 0)',
        },
    },
    "ring-reversed": {
        "ring_core.reference.simulator:_hop": {"(r - hop)": "(r + hop)"},
        "ring_torch.comm.ranks:Ranks.start": {
            "    if self.members is not None:":
            "    sends = [(x, (2 * self.rank - peer) % self.size) for x, peer in sends]\n"
            "    receives = [(x, (2 * self.rank - peer) % self.size) for x, peer in receives]\n"
            "    if self.members is not None:",
        },
        "ring_jax.collectives:Ranks.move": {"(target - hop)": "(target + hop)"},
    },
    "merge-without-rescale": {
        "ring_core.base.merge:merge": {"(weight / total)[..., None] * part": "part"},
        _MERGE: {"some_out.mul_(old)": "pass", "out[:, rows] * new": "out[:, rows]"},
        "ring_jax.strategies.ring:merge": {" * jnp.exp(x.lse - safe)[..., None]": ""},
    },
    "sink-per-step": {  # counted twice
        "ring_core.base.merge:finalize": {"(lse, folded[:, None])": f"(lse, {_LOG_2} + folded[:, None])"},
        "ring_torch.call:add_sinks": {"folded(sinks, lse.dtype)": f"{_LOG_2} + folded(sinks, lse.dtype)"},
        "ring_jax.strategies.steps:add_sinks": {"folded[None, :, None]": f"{_LOG_2} + folded[None, :, None]"},
    },
    "grads-not-sent-home": {
        "ring_core.reference.simulator:_backward": {"arrived = _hop(step_grads, stage.grad_hop)": "arrived = None"},
        "ring_torch.strategies.ring:RotatingKeyGrads.hop": {"elif arrived is not None:": "elif arrived is not None and not is_own:"},
        "ring_jax.strategies.steps:StepRunner.hop": {
            "self.ranks.move(x, hop)": "self.ranks.move(x, hop) if isinstance(x, KVPayload) else 0 * x",
        },
    },
    "local-positions": {
        "ring_core.plan.geometry:BandGeometry._runs": {
            "q_pos.reshape(flat), k_pos.reshape(flat)":
            "0 * q_pos.reshape(flat) + q_local.reshape(-1), 0 * k_pos.reshape(flat) + k_local.reshape(-1)",
        },
    },
    "lse-in-base-2": {
        "ring_core.reference.item_kernel:forward": {"safe + np.log(total)": f"(safe + np.log(total)) / {_LOG_2}"},
        _MERGE: {".to(some_lse.dtype)": f".to(some_lse.dtype) / {_LOG_2}"},
        "ring_jax.kernels.xla:XlaKernel.attend_into": {
            "return ScoreBlocks": f"return (lambda x: x._replace(lse=x.lse / {_LOG_2}))(ScoreBlocks",
            "_attend_row_block, into\n    )": "_attend_row_block, into\n    ))",
        },
    },
    "wrong-kv-head": {
        "ring_core.reference.item_kernel:_heads": {
            ".repeat(heads // x.shape[2], axis=1)": ".repeat(heads // x.shape[2], axis=1)[:, ::-1]",
        },
        "ring_torch.kernels.sdpa:_head_groups": {
            "slice(start, None, group) for start in range(group)":
            "slice(start, start + k.shape[1]) for start in range(0, q.shape[2], k.shape[1])",
        },
        "ring_jax.strategies.steps:own_message": {"axis=-1), x.k_ids": "axis=-1)[:, ::-1], x.k_ids"},
    },
    "lse-gradient-dropped": {
        "ring_core.reference.simulated_ranks:start_backward": {"if dlse is not None:": "if False:"},
        "ring_torch.autograd:AttentionFunction.backward": {"(dout, dlse), release_saved)": "(dout, None), release_saved)"},
        "ring_jax.attention:attend": {
            "return _compiled(call)(inputs)":
            "out, lse = _compiled(call)(inputs)\n    return out, jax.lax.stop_gradient(lse)",
        },
    },
    "help-not-returned": {  # what helpers computed, in strategy `balanced`
        _ITEMS: {_HOME: "return tuple(x for x in self._items[rank][step] if x.q_rank == rank)"},
        _STEP_TABLE: {"peer=_compact_rows(table, is_peer)": "peer=0 * _compact_rows(table, is_peer)"},
    },
    "bias-not-shifted": {  # `lse` has no digits left next to biases of -1e10
        "ring_core.reference.simulated_ranks:bias_shift": {"if inputs.bias is None or": "if True or"},
        "ring_torch.autograd:bias_shift": {"top.masked_fill_(~is_needed, 0.0)": "top.zero_()"},
        "ring_jax.autodiff:with_bias_shift": {"x.bias.size > 0": "x.bias.size < 0"},
    },
}  # fmt: skip

_OVERLAPPED = {
    _GATHERED: {
        "    del group": "    if overlapped:\n        return lambda *_: None\n    del group"
    }
}
#: Mutants that only strategy ``gather`` shows.
GATHERED_MUTANTS: dict[str, Edits] = {
    "fetched-from-the-wrong-rank": {
        "ring_core.programs.gather:_fetches": {
            "yield Fetch(\n                    rank,":
            "yield Fetch(\n                    (rank + 1) % (1 + max(x for _, x in runs)),",
        },
    },
    "gathered-grads-not-sent-home": {_GATHERED: {"    del group": "    return lambda *_: None\n    del group"}},
    "grads-beside-kernels-dropped": _OVERLAPPED,
    "grads-after-kernels-dropped": {
        _GATHERED: {"    del group": "    if not overlapped:\n        return lambda *_: None\n    del group"},
    },
}  # fmt: skip

#: Mutants that only strategy ``gather`` in JAX shows.
JAX_GATHERED_MUTANTS: dict[str, Edits] = {
    "gathered-out-of-order": {
        "ring_jax.collectives:Ranks.gather": {
            "lax.all_gather(": "__import__('jax').numpy.roll(lax.all_gather(",
            "tiled=True),": "tiled=True), x.shape[axis], axis),",
        },
    },
    "scattered-grads-dropped": {"ring_jax.collectives:Ranks.scatter": {"return cast": "return 0 * cast"}},
}  # fmt: skip

_EXCHANGE = "ring_jax.strategies.ulysses:HeadExchange"
#: Mutants that only strategies that trade tokens for heads in JAX show.
JAX_HEAD_MUTANTS: dict[str, Edits] = {
    "jax-copies-not-summed": {f"{_EXCHANGE}.summed_copies": {".sum(axis=3)": "[..., 0, :]"}},
    "jax-padding-has-gradients": {f"{_EXCHANGE}.placed": {"if not zero_padding:": "if True:"}},
    "jax-options-of-the-first-heads": {f"{_EXCHANGE}.inputs": {"[self.ranks.rank()]": "[0]"}},
    "jax-dropout-of-local-heads": {f"{_EXCHANGE}.inputs": {"jnp.take(numbers[1:], own)": "numbers[1 : 1 + len(own)]"}},
    "jax-shared-bias-grad-of-one-rank": {"ring_jax.collectives:Ranks.scatter": {"return cast": "return 0 * cast"}},
    "jax-ids-of-queries-for-keys": {f"{_EXCHANGE}.inputs": {"self._all_ids(x.k_ids, columns)": "self._all_ids(x.q_ids, rows)"}},
    "jax-heads-to-the-wrong-rank": {
        "ring_jax.collectives:Ranks.trade": {"lax.all_to_all(": "lax.all_to_all(__import__('jax').numpy.flip(", "x, self.axis_name,": "x, split), self.axis_name,"},
    },
}  # fmt: skip

#: Heads are gathered in groups even for little work; results may not change.
_IN_GROUPS = {
    "ring_torch.strategies.gather:head_groups_of": {
        "return HeadGroups(forward, backward, before_last_item=flops > EARLY_RETURN_FLOPS)":
        "forward, backward = (__import__('math').gcd(n, keys.heads) for n in (2, 4))\n"
        "    return HeadGroups(forward, backward, before_last_item=True)",
    },
}  # fmt: skip
#: Mutants that only a gather in groups of heads shows.
GROUP_MUTANTS: dict[str, Edits] = {
    "groups-swapped": {
        **_IN_GROUPS,
        "ring_torch.strategies.gather:Gather._keys_by_group": {
            "keys.columns(saved[:per_group], ": "keys.columns(saved[-per_group:], ", "del saved[:per_group]": "del saved[-per_group:]",
        },
    },
    "grads-of-groups-dropped": {**_IN_GROUPS, **_OVERLAPPED},
}  # fmt: skip

#: Mutants that only strategies that trade tokens for heads (Ulysses) show.
HEAD_MUTANTS: dict[str, Edits] = {
    "groups-interleaved": {
        "ring_core.programs.grid:RankGrid.inner_ranks": {
            "range(first, first + self.ulysses_size)": "range(rank % self.outer_size, self.ranks, self.outer_size)",
        },
        "ring_core.programs.grid:RankGrid.outer_ranks": {
            "return range(rank % self.ulysses_size, self.ranks, self.ulysses_size)":
            "first = rank - rank % self.outer_size\n    return range(first, first + self.outer_size)",
        },
    },
    "groups-over-contiguous": {"ring_core.programs.grid:RankGrid.outer_layout": {"if self.outer_size == 1:": "if True:"}},
    "indices-inverted": {
        "ring_core.programs.grid:RankGrid.scatter_indices": {
            'np.argsort(np.argsort(positions, kind="stable"), kind="stable")': 'np.argsort(positions, kind="stable")',
        },
    },
    "copies-not-summed": {_TABLES: {"table(heads.kv_slots,": "table(heads.kv_slots[:, :1],"}},
    "padding-has-gradients": {_TABLES: {"(heads.q == PADDING)": "(heads.q == PADDING)[:0]"}},
    "options-of-the-first-heads": {
        _TABLES: {"slice(int(own[0]), int(own[-1]) + 1) if is_range else own_heads": "slice(0, len(own))"},
    },
    "dropout-of-local-heads": {_TABLES: {"    own_heads,": "    own_heads - own_heads[0],"}},
    "shared-bias-grad-of-one-rank": {  # only the gradient of a bias is sent by itself
        "ring_torch.buffers:HeadCarrier.to_tokens": {
            "return results": "results[0][:, :, 1:] *= len(results) > 1\n    return results",
        },
    },
    "ids-of-queries-for-keys": {
        "ring_torch.strategies.ulysses:_with_options": {
            "return inner_inputs": "return inner_inputs._replace(k_ids=inner_inputs.q_ids)",
        },
    },
    "message-from-the-wrong-rank": {
        "ring_torch.transports.p2p:move": {
            "    dim, message =": "    buffer = buffer if packs else buffer.roll(1, dims=0)\n    dim, message =",
        },
    },
}  # fmt: skip

#: Mutants that only messages of several tensors show.
BUFFER_MUTANTS: dict[str, Edits] = {
    "rounded-down": {
        "ring_torch.buffers:aligned_bytes": {
            "-(-math.prod(shape) * dtype.itemsize // _ALIGNED_BYTES)": "math.prod(shape) * dtype.itemsize // _ALIGNED_BYTES",
        },
        "ring_torch.buffers:BufferSpec.of": {
            "        size,\n": "        size + 16,\n",
        },
    },
    "spans-from-the-start": {
        "ring_torch.buffers:KeyGradBuffer.strided_views": {
            "keys = self.keys": "keys, span = self.keys, slice(0, span.stop - span.start)",
        },
    },
}  # fmt: skip

#: Changes that must not change results. Short calls, too, are copied.
HARMLESS: dict[str, Edits] = {
    "in-groups": _IN_GROUPS,
    "by-copies": {"ring_torch.transports.peer_copies:fits_one_kernel": {"return fits and": "return False and"}},
}  # fmt: skip

TABLES = (
    MUTANTS, GATHERED_MUTANTS, JAX_GATHERED_MUTANTS, JAX_HEAD_MUTANTS, GROUP_MUTANTS, HEAD_MUTANTS, BUFFER_MUTANTS, HARMLESS,
)  # fmt: skip
ALL = {name: edits for table in TABLES for name, edits in table.items()}
assert len(ALL) == sum(map(len, TABLES)), "two mutants have one name: one would never run"
