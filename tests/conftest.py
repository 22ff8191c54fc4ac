"""What runs for which backend; a backend that was asked for and cannot start is an error."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import numpy.typing as npt
import pytest
from cases import RINGS

from ring_core import ChunkLayout

#: Folders that every framework runs.
MATRICES = ("conformance", "docs", "fuzz", "meta")
FOLDERS = {
    "core": {"api", "core", "conformance", "docs", "fuzz", "meta", "regressions/core"},
    "torch": {"api", "torch_only", "faults_of_others", "regressions/torch", *MATRICES},
    "torch-cuda": {"conformance", "torch_cuda_only", "regressions/torch_cuda"},
    "torch-triton": {"torch_triton_only", "regressions/torch_triton"},
    "jax": {"api", "jax_only", "conformance", "docs", "fuzz", "meta", "regressions/jax"},
    "jax-cuda": {"conformance", "jax_cuda_only"},
    "jax-gpu": {"api", "docs", "jax_gpu_only", "regressions/jax_gpu"},
    "jax-tpu": {"api", "docs", "jax_tpu_only", "regressions/jax_tpu"},
    "maxtext": {"maxtext"},
    "none": {"packaging"},
}
#: Matrices of which a part runs each time: where the numbers of the values, each counted from 0 in
#: its list, add up to a multiple of this. All values run.
PARTS = {
    "test_meshes.py::test_every_mesh": 4,
    "test_padded_documents.py::test_padded_to_different_lengths": 4,
    "test_dense_masks.py::test_context_parallel": 2,
    "test_api.py::test_context_parallel": 2,
    "test_program.py::test_transfers_are_the_plans": 3,
    "test_hf.py::test_logits_loss_and_gradients_are_the_whole_models": 3,
    "test_parallelize.py::test_logits_loss_and_gradients_are_one_devices": 2,
    "test_hf_hooks.py::test_a_decoder": 6,
    "test_hf_hooks.py::test_an_encoder_and_a_decoder": 4,
    "test_hf_hooks.py::test_images_among_tokens": 2,
    "test_compiled_numbers.py::test_one_graph_for_all": 2,
    "test_peer_copies.py::test_case": 4,
    "test_failed_pass.py::test_a_failed_pass_is_named_on_all_ranks": 2,
    "test_benchmark.py::test_ways_in_plain_jax": 2,
    "test_compiled.py::test_roles_on_hopper": 3,
    "test_kernels.py::test_what_the_kernels_for_hopper_leave": 4,
    "test_kernels.py::test_oblong_blocks": 2,
    "test_long_shards.py::test_long_shards_run_in_pallas": 2,
    "test_visits.py::test_live_blocks": 2,
    "test_tune.py::test_calls_of_each_kernel_use_their_row": 2,
}
#: Tests of TPU kernels that show what others show too, in a case or on a chip of their own. Of
#: programs the forward is compiled; of backward kernels, the kernels.
SLOW_ON_TPU = (
    "test_options_compile", "test_other_cases", "test_other_layouts_compile",
    "test_in_one_program[everything", "test_forward_and_backward",
    *(f"test_compiles[{chip}-True" for chip in ("v4:2x2x1", "v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")),
    *(f"test_compiles[{chip}-False" for chip in ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")),
    *(f"test_forward[{chip}" for chip in ("v4", "v5p", "v6e", "tpu7x")),
    "test_where_the_compiler_is_told_to_drop_barriers",
    *(f"test_two_backward_kernels[{case}]" for case in (
        "full", "window", "chunks", "documents", "predicate", "keys", "fewer-keys", "bfloat16",
        "softcap", "segments", "bias", "poison-v", "dropout", "alibi", "gqa", "everything",
        "window-both", "predicate-documents", "poison-padding", "segments-pair",
    )),
    "test_fused_backward_kernel[everything",  # as test_pieces does
    *(f"test_fused_backward_kernel[{case}" for case in ("gqa", "poison-v", "segments")),
    "test_ways_of_generations[TPU v4", "test_ways_of_generations[TPU7x", "test_pieces_in_the_ring",
    "test_selected_cases[shortest-zigzag-cp2", "test_selected_cases[everything",  # as test_pieces
    "test_selected_cases[causal-balanced-cp3",  # as test_in_one_program does
    "test_blocks_of_dq_that_come_back_at_once[heads0",
    "test_blocks_of_dq_that_come_back_at_once[heads1-200",
    "test_pieces_of_every_mask", "test_long_shards_compile", "test_transfers_beside_pieces[True",
    "test_a_dense_mask_is_exact[shape0", "test_a_dense_mask_is_exact[shape1",
    "test_hidden_blocks_are_not_visited[shape1",
    "test_selected_cases[keys64-predicate", "test_transfers_beside_pieces[False",
)  # fmt: skip
#: Kernels of whose kind others are compiled each time, or with torch, masks and options that others
#: hold too or that run with torch; benchmarks, of which the ways and the gates run each time.
SLOW_ON_GPU = (
    "test_options[bias", "test_options[predicate]", "test_options[last",
    "test_in_the_ring[documents-window", "test_in_the_ring[predicate-zigzag-cp2",
    "test_over_gathered_keys[documents-window", "test_hidden_blocks_are_on_no_list[shape0",
    "test_a_dense_mask_is_exact[shape0", "test_over_gathered_keys[bias",
    "test_in_the_ring[keys64-predicate", "test_in_the_ring[documents-chunks",
    "test_a_dense_mask_is_exact[shape1", "test_ways_in_plain_jax[auto-all-gather",
    "test_a_dense_mask_is_exact[shape2", "test_the_whole_run",
    "test_in_the_ring[everything", "test_options[float32",
    *(f"test_calls_of_each_kernel_use_their_row[bwd_{x}" for x in ("dkv", "dq", "dbias", "fused")),
    "test_causal[90", "test_options[wide", "test_options[dropout", "test_in_the_ring[predicate-balanced-cp4",
    *(f"test_several_blocks[{x}]" for x in (
        "predicate-documents", "keys", "dropout", "everything", "wider", "wider-k", "float16",
        "segments-pair", "segments-chunks", "segments-documents", "no-scale", "bias-shared",
        "poison-q", "poison-padding",
    )),
    *(f"test_cases[cudnn-{x}]" for x in (
        "odd-mixed", "bias-batch", "bias-heads", "bias-masked-float16", "full-cp4", "mixed-cp2",
        "zigzag-cp4", "window-of-one", "wider-k",
    )),
)  # fmt: skip
#: In ring_torch: ring_jax_gpu compiles the same kernels. In the ring, cases whose options and masks
#: others of it have. Three interpreted kernels that wait for each other, which takes a minute where
#: other work has the cores.
SLOW_WITH_TRITON = (
    "test_nobody_overtakes",
    "test_causal[80", "test_causal[100", "test_bias",
    "test_in_the_ring[mqa-zigzag-gather", "test_in_the_ring[keys64-predicate",
    "test_hidden_blocks_are_on_no_list[striped",
    *(f"test_options[{x}" for x in ("fused", "wide", "odd", "predicate", "dropout")),
    "test_a_dense_mask_is_exact[shape1", "test_a_dense_mask_is_exact[shape3",
    "test_in_the_ring[options-random", "test_in_the_ring[documents-window",
    "test_in_the_ring[bias-masked", "test_in_the_ring[alibi-batch",
    *(f"test_several_blocks[{x}" for x in (
        "predicate]", "documents]", "v-inf", "window", "causal]", "segments", "bias", "poison", "gqa", "float16",
    )),
    "test_options[segments", "test_in_the_ring[everything-contiguous-gather",
    "test_fused_backward[gqa", "test_fused_backward[poison", "test_oblong_blocks[predicate",
    "test_oblong_blocks[segments",
)  # fmt: skip
#: Another test calls the demonstration with more options, and torchrun starts it as a program; the
#: line for several hosts takes two launchers. Of a Trainer, other families of models and more
#: settings of it. A run that is killed and started again; backends broken on purpose as the
#: simulator is each time, three of which stay.
SLOW_IN_TORCH = (
    "test_demonstration_as_a_command", "test_the_lines_that_start_jobs_on_several_hosts",
    "test_steps_are_those_of_one_device[more", "test_families",
    "test_steps_of_a_loop_are_those_of_one_device", "test_a_whole_session[2", "test_under_autocast",
    "test_trainers_of_trl[dpo", "test_trainers_of_trl[reward", "test_a_routers_loss[False",
    "test_a_compiled_model", "test_few_steps[stream", "test_few_steps[loss of whole logits-2",
    "test_a_run_restarted_by_torchrun", "test_right_calls_whose_heads_are_cut_into_groups_pass[groups1",
    *(f"test_suite_goes_red[{mutant}" for mutant in (
        "help-not-returned", "wrong-kv-head", "lse-gradient-dropped", "sink-per-step",
        "last-step-dropped", "lse-in-base-2", "merge-without-rescale",
    )),
)  # fmt: skip
#: Combinations of masks, options and layouts that others hold too; an example's other options;
#: witnesses that are in the table; backends broken on purpose, of which the simulator and torch
#: show each time that they are seen; the doctor's and the timer's rarer answers; of models
#: of three libraries all ways to train but two, as pages and tests of adapters hold others.
SLOW_IN_JAX = (
    "test_devices_and_one_device_agree", "test_memory_is_linear_in_the_length",
    "test_two_host_devices_make_a_ring",
    "test_witnesses_are_green_otherwise[causal-contiguous-cp2",
    "test_suite_goes_red[window-off-by-one",
    *(f"test_case[{case}-" for case in (
        "softcap-large", "scale-zero", "sinks-many", "mha", "scale-negative", "segments-pair",
        "large-float16", "alibi-batch", "bias-shared", "poison-q", "window-small", "window-large",
        "window-left", "window-right", "mqa", "bias-masked", "segments-padded", "poison-k",
    )),
    "test_the_other_process_ends_in_time[SIGSTOP",
    "test_context_parallel[balanced-AxisType.Explicit",
    "test_replicated_parameters_get_their_gradient_once[True", "test_equinox[2-zigzag",
    "test_under_shard_map[False-True", "test_what_the_error_says_is_exact[window",
    "test_context_parallel[rows-alone-zigzag", "test_context_parallel[by head-bias-zigzag",
    "test_context_parallel[rows-sinks-striped", "test_context_parallel[rows-documents-contiguous",
    "test_what_the_error_says_is_exact[causal", "test_what_the_error_says_is_exact[chunks",
    *(f"test_suite_goes_red[{mutant}" for mutant in (
        "merge-without-rescale", "wrong-kv-head", "sink-per-step", "grads-not-sent-home",
        "local-positions", "lse-in-base-2",
    )),
    "test_witnesses_are_green_otherwise[full-zigzag", "test_witnesses_are_green_otherwise[gqa",
    "test_witnesses_are_green_otherwise[window", "test_bench", "test_a_result_that_is_not",
    "test_suite_goes_red[ring-reversed", "test_wrong_gradients_are_found",
    *(f"test_case[{case}-" for case in (
        "bias-float64", "keys16-causal", "keys16-window", "keys80-chunks", "keys80-predicate",
    )),
    "test_case[causal-striped-cp8", "test_case[options-random-cp2",
    *(f"test_training_is_that_of_one_device[{model}" for model in (
        "nnx-jit", "nnx-shard_map", "nnx-remat", "nnx-explicit", "linen-jit", "linen-shard_map",
        "linen-remat", "linen-scan", "equinox",
    )),
)  # fmt: skip
#: Faults that trip in JAX as others do each time, and right calls of other strategies.
TRIPPED = (
    *(f"test_a_fault_trips[{fault}" for fault in (
        "scale_dropped", "window_inverted", "one_head_wrong", "stale", "keys_one", "last_step",
        "counted",
    )),
    "test_right_calls_pass[balanced", "test_right_calls_pass[gather", "test_one_in_so_many",
    "test_under_transformations[vmap", "test_under_transformations[scan",
    "test_the_rate_of_a_pass_in_a_ring", "test_rates_under_transformations",
    "test_a_rate_that_no_device_has[1", "test_under_transformations[jit of vmap",
    "test_rings_beside_each_other_are_checked_each_by_itself[Explicit",
)  # fmt: skip
#: Masks that run on more numbers of ranks than the others.
FEW = ("causal", "window-shard", "documents", "shortest")
#: Numbers of keys other than of queries, that are left to GPUs but for these.
LONGER_AND_SHORTER = ("keys16-causal", "keys16-window", "keys80-chunks", "keys80-predicate")
#: Masks that run on one device in JAX.
ALONE = ("causal", "documents")
#: Cases of assigned chunks which run in JAX each time.
CHUNKS_IN_JAX = ("documents-window-chunks-cp3", "options-random-cp2")
#: Cases over gathered keys which run in JAX each time.
GATHERED_IN_JAX = (
    "window-both-zigzag-cp3", "documents-contiguous-cp3", "segments-zigzag",
    "options-random-cp2", "bias-zigzag",
)  # fmt: skip
#: Cases of short passes whose kernels are interpreted each time.
AT_ONCE = (
    "causal-zigzag-cp2", "window-both-zigzag-cp3", "mqa-zigzag", "v-dim-zigzag",
    "keys80-causal-zigzag", "causal-random-cp4",
)  # fmt: skip
#: Where cases of the table run again, in another way, in torch.
AGAIN = ("test_gather.py", "test_flash.py", "test_ulysses.py")
HERE = Path(__file__).parent

hypothesis.settings.register_profile("ci", max_examples=300, deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", max_examples=5000, deadline=None)
hypothesis.settings.register_profile("fewer", max_examples=100, deadline=None, derandomize=True)
hypothesis.settings.register_profile(
    "mutants", max_examples=100, deadline=None, derandomize=True, phases=[hypothesis.Phase.generate]
)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this suite."""
    parser.addoption("--backend", required=True, choices=sorted(FOLDERS), help="what to test")
    parser.addoption(
        "--all",
        action="store_true",
        help="torch, jax: all masks everywhere, all combinations; other backends: all cases",
    )
    parser.addoption(
        "--mutant", default=None, help="break the backend on purpose: the run must fail"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settings that jax reads when it is imported: host devices, and no time spent on fast code.

    For torch, start the process that ranks are forked from with all they import, once.
    """
    backend, also = (
        config.getoption("--backend"),
        {"torch": "ring_torch.hf", "torch-triton": "triton"},
    )
    runs_tests = not config.getoption("numprocesses", None)  # else its workers do
    if backend == "torch-triton":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, in ranks too
    if backend in also and runs_tests and not config.getoption("--collect-only"):
        from ring_torch.local import PRELOADED

        multiprocessing.set_forkserver_preload([*PRELOADED, also[backend]])
        forkserver.ensure_running()
    if config.getoption("--backend") == "torch-cuda":
        # NCCL waits so long, 60 s by default, before it ends a process whose peer is lost.
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
    if config.getoption("--backend") == "jax-cuda":
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"  # callbacks of checked calls need the latter
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # workers share the GPUs
        return
    if not config.getoption("--backend").startswith("jax"):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"  # as many programs run, and tests of JAX
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["NPROC"] = "32"  # threads for callbacks of several devices, on machines of few cores
    if backend == "jax" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # Of this run: its workers, and the processes that tests start, compile a program once.
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    # Traces are many objects that live: a fifteenth of the time went into looking for others.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no TPU: only its compiler is used
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out folders of other backends, which could not even be imported."""
    wanted = FOLDERS[config.getoption("--backend")]
    parts = collection_path.relative_to(HERE).parts if collection_path.is_relative_to(HERE) else ()
    others = set().union(*FOLDERS.values()) - wanted
    return True if {"/".join(parts[:n]) for n in (1, 2)} & others else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On GPUs, leave out the cases of more ranks than there are GPUs.

    In JAX a case takes seconds to compile: unless all are asked for, all masks run on 3 devices, a
    few of them on 1, 2, 4 and 8 too, and each option and most masks in one of the four
    rings, the causal one in all on 3. In torch all run on 2 and 3 ranks in all rings, on 4 and 8
    most in one. On one rank all rings are the same, so one runs.
    """
    backend = config.getoption("--backend")
    if not config.getoption("--all"):
        slow = [*_outside_of_parts(items), *(item for item in items if _is_slow(item, backend))]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    if not backend.endswith("-cuda"):
        return
    gpus = _gpus(backend)
    if gpus == 0:
        raise pytest.UsageError(f"backend {backend} was asked for, and there is no GPU")
    too_large = [item for item in items if _ranks(item) > gpus]
    config.hook.pytest_deselected(items=too_large)
    items[:] = [item for item in items if item not in too_large]


def _gpus(backend: str) -> int:
    """How many GPUs there are."""
    if backend == "jax-cuda":
        import jax

        return jax.local_device_count()
    import torch

    return torch.cuda.device_count()


def _ranks(item: pytest.Item) -> int:
    """How many ranks a test needs, or its case."""
    if (mark := item.get_closest_marker("ranks")) is not None:
        return int(mark.args[0])
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    return getattr(case, "cp_size", 1)


def _outside_of_parts(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """What the parts of matrices leave out."""
    numbers: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for item in items:
        test = f"{item.path.name}::{item.name.partition('[')[0]}"
        callspec = getattr(item, "callspec", None)
        if test in PARTS and callspec is not None:
            found = [
                numbers[test, name].setdefault(repr(value), len(numbers[test, name]))
                for name, value in callspec.params.items()
            ]
            if sum(found) % PARTS[test]:
                yield item


def _is_slow(item: pytest.Item, backend: str) -> bool:
    """Whether a test runs only where all are asked for."""
    slow = {
        "jax-tpu": SLOW_ON_TPU, "jax": (*SLOW_IN_JAX, *TRIPPED), "jax-gpu": SLOW_ON_GPU,
        "torch": SLOW_IN_TORCH, "torch-triton": SLOW_WITH_TRITON,
    }.get(backend)  # fmt: skip
    if slow and item.name.startswith(slow):
        return True
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    return case is not None and _is_slow_case(case, backend, item.path.name)


def _is_slow_case(case: Any, backend: str, file: str) -> bool:
    if backend == "torch-triton":
        return file == "test_at_once.py" and case.name not in AT_ONCE
    if backend not in ("torch", "jax", "jax-cuda"):
        return False
    if case.cp_size == 1 and case.ring != "contiguous":
        return True
    if backend == "torch":
        return _is_slow_in_torch(case, again=file in AGAIN)
    if file == "test_gather.py":
        return case.name not in GATHERED_IN_JAX
    return _is_slow_in_jax(case) or (backend == "jax" and _is_slow_on_hosts(case))


def _is_slow_in_torch(case: Any, *, again: bool) -> bool:
    """Most masks have one of the four rings on many ranks, and none where cases run again."""
    mask, size = _mask_and_size(case)
    if mask in FEW or size not in ("3", "4", "8") or isinstance(case.layout, ChunkLayout):
        return False
    if size == "3":
        return again and _is_not_in_turn(case, mask)
    return again or _is_not_in_turn(case, mask + size)


def _is_slow_in_jax(case: Any) -> bool:
    if case.cp_size == 1:
        return False
    if isinstance(case.layout, ChunkLayout):
        return case.name not in CHUNKS_IN_JAX
    mask, size = _mask_and_size(case)
    if (mask == "causal" and size in ("2", "3")) or (mask == "documents" and size == "3"):
        return False
    if mask.startswith("keys"):  # one number of keys for each
        keys, _, mask = mask.partition("-")
        if keys != ("keys16", "keys64", "keys80")[crc32(mask.encode()) % 3]:
            return True
    # One of the four rings for the others, and for few masks on other numbers of devices.
    elsewhere = size in ("2", "4", "8")
    return (elsewhere and mask not in FEW) or _is_not_in_turn(case, mask + size * elsewhere)


def _is_slow_on_hosts(case: Any) -> bool:
    """Whether a case is left to GPUs, of those that run in JAX."""
    if isinstance(case.layout, ChunkLayout):
        return False
    mask, size = _mask_and_size(case)
    if size == "1":
        return mask not in ALONE
    if mask.startswith("keys"):
        return not mask.startswith(LONGER_AND_SHORTER)
    if (mask, size) in (("causal", "2"), ("documents", "3")):
        return _is_not_in_turn(case, mask)
    if size == "8":
        return mask != "causal"
    return size in ("2", "4") and mask not in ("causal", "shortest")


def _is_not_in_turn(case: Any, name: str) -> bool:
    """Whether one of the four rings that a name has is another than the case's."""
    return bool(case.ring != tuple(RINGS)[crc32(name.encode()) % len(RINGS)])


def _mask_and_size(case: Any) -> tuple[str, str]:
    """What the name of a case begins with, and the number of ranks in it, if any."""
    name, _, size = case.name.partition("-cp")
    return name.removesuffix(f"-{case.ring}"), size


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is being tested."""
    backend, mutant = config.getoption("--backend"), config.getoption("--mutant")
    return f"backend: {backend}" + (f", broken on purpose: {mutant}" if mutant else "")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The backend under test: an object with ``run(case, mutant=None)``."""
    name = request.config.getoption("--backend")
    if name == "core":
        from backends.simulator import SimulatorBackend

        yield SimulatorBackend()
    elif name in ("torch", "torch-cuda"):
        from backends.torch_ranks import TorchBackend

        running = TorchBackend(cuda=name == "torch-cuda")
        yield running
        running.close()
    elif name == "jax":
        from backends.jax_devices import JaxBackend

        yield JaxBackend()
    elif name == "jax-cuda":
        from backends.jax_devices import JaxBackend

        import ring_jax_gpu

        yield JaxBackend(ring_jax_gpu.ring_attention)
    else:
        pytest.fail(f"backend {name} runs no cases")


@pytest.fixture
def run(backend: Any, request: pytest.FixtureRequest) -> Callable[..., dict[str, npt.NDArray[Any]]]:
    """Run a case on the backend under test, with the mutant of the command line, if any."""
    mutant = request.config.getoption("--mutant")
    return lambda case: backend.run(case, mutant=mutant)
