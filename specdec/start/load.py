"""From a caller's choices to an engine that is ready: weights, a memory plan, graphs.

Each phase logs how long it took, at level "info".
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from graphs.cuda import CudaBackend
from graphs.frozen_heap import frozen_heap
from graphs.protocol import GraphBackend
from specdec.config import MAX_PROMPT_SLOWDOWN, EngineConfig, GraphConfig
from specdec.engine import Engine
from specdec.guided.guides import Guides
from specdec.kernels.compilations import (
    compiling_is_expected,
    hashing_compiler,
    log_compilations,
)
from specdec.kernels.tables import user_table
from specdec.kernels.tiles import dtype_name
from specdec.models.build import bytes_per_block
from specdec.models.products import experts_of, products_of
from specdec.parallel.begin import Found, check_ranks, leading
from specdec.parallel.ranks import ALONE, ONE_RANK, Parallel, Ranks
from specdec.requests.intake import Intake
from specdec.requests.tokenizer import Tokenizer
from specdec.runner import Runner
from specdec.scheduling.costs import PromptBudget
from specdec.scheduling.planner import Planner
from specdec.sizes import EngineSizes
from specdec.speculative_config import SpeculativeConfig
from specdec.start.compile_ahead import compile_ahead
from specdec.start.device import (
    advise_threads,
    device_memory,
    device_of,
    dtype_of,
    log_tiles,
    note_gpu_memory,
)
from specdec.start.locate import hub_of, locate, locate_tokenizer
from specdec.start.measure_costs import NEVER, largest_captured, measure_costs, measure_round_costs
from specdec.start.memory import measure_needs, memory_table, plan_memory
from specdec.start.sizing import (
    GIB,
    cache_factor,
    check_heads,
    check_length,
    check_target,
    check_tokenizer,
    check_weights,
    largest_sizes,
)
from specdec.start.speculation import Drafting, drafting_of, of_draft
from weights.config import TargetConfig
from weights.files.reader import Reader
from weights.load import LoadedEagle, LoadedTarget, load_eagle, load_target
from weights.report import Log
from weights.target import resolve_target

logger = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The models as they were read, and what runs them."""

    target: LoadedTarget
    eagle: LoadedEagle | None
    tokenizer: Tokenizer
    engine: Engine


@compiling_is_expected()
def load(
    model: str | Path,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
    parallel: Parallel = ONE_RANK,
) -> Loaded:
    """Load everything and build the engine.

    ValueError for what does not fit together or on the device; weights.CheckpointError for files;
    RankError if another rank cannot load.
    """
    if parallel.size > 1:
        config = replace(config, device=check_ranks(device_of(config.device), parallel.size))
    device = device_of(config.device)
    advise_threads(device)
    has_draft = speculation is not None and speculation.num_speculative_tokens != 0
    backend = _backend(config, device, has_draft)
    drafting = drafting_of(speculation, backend is not None)
    if device.type == "cuda":
        hashing_compiler()
        user_table()  # a faulty one is refused before weights are read
    hub = hub_of(config)  # all three are located before any is read
    directory = locate(model, "target", hub)
    tokenizer_directory = locate_tokenizer(model, config, directory)
    draft_directory = None
    if speculation is not None:
        draft_hub = replace(hub, revision=speculation.revision)
        draft_directory = locate(speculation.model, "draft", draft_hub)
    # first: a directory that is no target says so here, not by the tokenizer that it lacks
    reader = Reader(directory)
    known = resolve_target(reader, Log())
    is_valid = not reader.problems.lines  # which load_target lists all at once
    if is_valid:
        check_target(directory, known, config.max_model_len)
        largest_sizes(config, drafting, known, None)  # refuses a length early
        check_weights(reader, dtype_of(config.dtype, device), device_memory(device))
    found = Found(directory, draft_directory, speculation, drafting)
    with leading(found, config, parallel) as lead:
        with _phase("tokenizer"):
            tokenizer = Tokenizer(tokenizer_directory)
            if is_valid:
                check_tokenizer(tokenizer_directory, tokenizer, known.vocab_size)
        ranks = ALONE if lead is None else lead
        target, eagle, runner = _load_models(found, config, backend, ranks)
        runner.followers = lead
        engine = assemble(
            runner,
            target.config,
            tokenizer,
            seed=config.seed,
            use_prefix_cache=config.enable_prefix_caching,
            is_async=config.async_scheduling,
            slowdown=config.max_prompt_slowdown,
        )
        if lead is not None:
            with _phase("other ranks"):
                lead.serve()
    if device.type == "cuda":
        log_compilations()
    return Loaded(target=target, eagle=eagle, tokenizer=tokenizer, engine=engine)


@compiling_is_expected()
def load_rank(found: Found, config: EngineConfig, ranks: Ranks) -> Runner:
    """Load the models of another rank, on its own device, in the order in which rank 0 does."""
    device = device_of(config.device)
    backend = _backend(config, device, found.has_draft)
    if device.type == "cuda":
        hashing_compiler()
    return _load_models(found, config, backend, ranks)[-1]


def _load_models(
    found: Found, config: EngineConfig, backend: GraphBackend | None, ranks: Ranks
) -> tuple[LoadedTarget, LoadedEagle | None, Runner]:
    """Read the weights and build the runner: the part of the start that every rank does."""
    device, progress = device_of(config.device), config.use_tqdm_on_load
    speculation, drafting = found.speculation, found.drafting
    with _phase("target weights"):
        dtype = dtype_of(config.dtype, device)
        target = load_target(found.target, dtype=dtype, device=device, progress=progress)
    logger.info("%s", target.report)
    eagle = None
    if speculation is not None and found.draft is not None:
        with _phase("draft weights"):
            eagle = _load_draft(found.draft, speculation, target, progress)
        logger.info("%s", eagle.report)
        drafting = of_draft(drafting, eagle.config.draft_vocab_size)
    ranks.join(device)
    return target, eagle, _runner(config, speculation, drafting, target, eagle, backend, ranks)


def assemble(
    runner: Runner,
    target: TargetConfig,
    tokenizer: Tokenizer,
    *,
    seed: int | None = None,
    use_prefix_cache: bool = False,
    is_async: bool | None = None,
    slowdown: float = MAX_PROMPT_SLOWDOWN,
) -> Engine:
    """seed: of the seeds that are drawn, None by chance. is_async: run ahead; None: on a GPU.

    slowdown: see EngineConfig.max_prompt_slowdown; on a CPU, where no costs are measured, prompts
    ride whole.
    """
    rule = runner.acceptance
    eos_token_ids = target.eos_token_ids or _tokenizers_eos(tokenizer, target.vocab_size)
    guides = Guides(tokenizer, target.vocab_size, eos_token_ids)
    intake = Intake(
        tokenizer, runner.sizes, target.vocab_size, eos_token_ids, seed, rule, guides=guides
    )
    is_gpu = runner.device.type == "cuda"
    costs = planner = None
    with runner.stopping_below(NEVER):
        if is_gpu:
            costs = measure_costs(runner)
        if runner.sizes.is_adaptive:
            shapes, num_levels = runner.graphs.shapes, runner.sizes.num_speculative_tokens
            round_costs = measure_round_costs(runner, costs)
            planner = Planner(round_costs, shapes, num_levels, runner.confidence_threshold)
    return Engine(
        runner,
        intake,
        use_prefix_cache=use_prefix_cache,
        num_steps_ahead=int(is_gpu if is_async is None else is_async),
        budget=None if costs is None else PromptBudget(costs=costs, slowdown=slowdown),
        planner=planner,
    )


def _tokenizers_eos(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Take the tokenizer's EOS token where no config of the checkpoint has one, as in vLLM."""
    found = tokenizer.eos_token_id
    if found is None or found >= vocab_size:  # which the target never draws
        return ()
    logger.info("eos_token_id=%d: the tokenizer's, since the checkpoint's configs have none", found)
    return (found,)


@contextmanager
def _phase(name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    logger.info("start: %-15s %6.2f s", name, time.monotonic() - start)


def _backend(config: EngineConfig, device: torch.device, has_draft: bool) -> GraphBackend | None:
    """Choose what captures, None for eager runs; ValueError for options that would do nothing."""
    if device.type != "cuda":
        config.refuse_graph_options(f"graphs are captured on a GPU only, not on device {device}")
        note_gpu_memory(config.gpu_memory_utilization, device)
        return None
    config.refuse_unused_graph_options(has_draft)
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current one
    return None if config.enforce_eager else CudaBackend(device)


def _load_draft(
    directory: Path, speculation: SpeculativeConfig, target: LoadedTarget, progress: bool
) -> LoadedEagle:
    device = target.tensors["embed_tokens.weight"].device
    aux_layers = None if speculation.aux_layers is None else tuple(speculation.aux_layers)
    eagle = load_eagle(directory, target, device=device, aux_layers=aux_layers, progress=progress)
    method = "eagle" if eagle.config.entry == "fc" else "eagle3"
    if speculation.method not in ("auto", method):
        raise ValueError(
            f"method={speculation.method!r}, but {speculation.model} is an {method} draft (format "
            f"{eagle.config.format}); give method='auto' or method={method!r}"
        )
    return eagle


def _runner(
    config: EngineConfig,
    speculation: SpeculativeConfig | None,
    drafting: Drafting,
    target: LoadedTarget,
    eagle: LoadedEagle | None,
    backend: GraphBackend | None,
    ranks: Ranks,
) -> Runner:
    """Build the runner with a cache that fits, its graphs captured."""
    embedding = target.tensors["embed_tokens.weight"]
    device, dtype = embedding.device, embedding.dtype
    of_draft = None if eagle is None else eagle.config
    products = products_of(target.config, of_draft, dtype_name(dtype))
    log_tiles(products, experts_of(target.config), device)
    most = largest_sizes(config, drafting, target.config, of_draft)
    if most.max_num_seqs < config.max_num_seqs:
        logger.info("max_num_seqs=%d, the most with draft trees", most.max_num_seqs)
    check_heads("target", target.local.heads, dtype, device)
    block = bytes_per_block(target.local.heads, target.config.num_layers, dtype)
    if eagle is not None:
        check_heads("draft", eagle.local.heads, dtype, device)
        has_cache = drafting.num_tokens > 0
        block += has_cache * bytes_per_block(eagle.local.heads, eagle.config.num_layers, dtype)
    if config.max_model_len is None:
        check_length(most, block, device_memory(device))
    build = partial(
        Runner,
        target,
        eagle,
        device=device,
        graph_config=config.graphs,
        backend=backend,
        acceptance="exact" if speculation is None else speculation.acceptance,
        confidence_threshold=drafting.confidence_threshold,
    )
    has_graphs = backend is not None
    if device.type == "cuda":
        with _phase("kernels"), frozen_heap():
            progress = config.use_tqdm_on_load
            build = compiled(build, most, config.graphs, has_graphs, progress, ranks)
    if device.type == "cuda" and config.num_kv_blocks is None:
        tensors = [x for model in (target, eagle) if model for x in model.tensors.values()]
        with _phase("memory plan"):
            needs = measure_needs(build, most, tensors, block, target.config.vocab_size)
        blocks = plan_memory(needs, config.utilization, most)
        logger.info("memory:\n%s", memory_table(needs, config.utilization, blocks))
    else:
        num_beside = ranks.size if device.type == "cpu" else 1
        blocks = _num_blocks(config, most, block, device_memory(device) // num_beside)
    with _phase("cache, graphs"), frozen_heap() if has_graphs else nullcontext():
        runner = build(replace(most, num_kv_blocks=ranks.least(blocks)))
        runner.capture()
    return runner


def compiled(
    build: "partial[Runner]",
    sizes: EngineSizes,
    graphs: GraphConfig,
    has_graphs: bool,
    progress: bool = True,
    ranks: Ranks = ALONE,
) -> "partial[Runner]":
    """Compile all kernels; return a builder whose runners capture steps as large as it pays."""
    trial = build(replace(sizes, num_kv_blocks=1))
    ranks.after_first(partial(compile_ahead, trial, progress))
    if not has_graphs or not graphs.captures_pieces_by_default:
        return build
    max_tokens = ranks.led(trial, partial(largest_captured, trial))
    return partial(build, graph_config=replace(graphs, max_tokens=max_tokens))


def _num_blocks(config: EngineConfig, most: EngineSizes, block: int, memory: int) -> int:
    """Take the blocks that were given, if memory holds them; on a CPU else a quarter of it.

    memory: bytes of a rank's device, or its share of the host
    """
    blocks = config.num_kv_blocks
    if blocks is None:
        return min(most.num_kv_blocks // cache_factor(config), max(memory // 4 // block, 1))
    if blocks * block >= memory:
        raise ValueError(
            f"num_kv_blocks={blocks} take {blocks * block / GIB:.2f} GiB, and there are "
            f"{memory / GIB:.2f} GiB: give fewer, or leave it out"
        )
    share = config.gpu_memory_utilization
    if share is not None:
        logger.info("num_kv_blocks=%d overrides gpu_memory_utilization=%g", blocks, share)
    return blocks
