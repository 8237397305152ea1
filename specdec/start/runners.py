"""Models of a rank, or whole ones, and the runner over them: what every rank of a start does."""

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
from specdec.config import EngineConfig, GraphConfig
from specdec.kernels.tiles import dtype_name
from specdec.models.build import bytes_per_block
from specdec.models.products import experts_of, products_of
from specdec.parallel.begin import Found
from specdec.parallel.ranks import ALONE, Ranks
from specdec.runner import Runner
from specdec.sizes import EngineSizes
from specdec.speculative_config import SpeculativeConfig
from specdec.start.compile_ahead import compile_ahead
from specdec.start.device import device_memory, device_of, dtype_of, log_tiles, note_gpu_memory
from specdec.start.measure_costs import largest_captured
from specdec.start.memory import measure_needs, memory_table, of_all_ranks, plan_memory
from specdec.start.sizing import GIB, cache_factor, check_heads, check_length, largest_sizes
from specdec.start.speculation import Drafting, of_checkpoint
from weights.draft.config import DraftConfig
from weights.load import LoadedEagle, LoadedTarget, load_eagle, load_target
from weights.shard import WHOLE

logger = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models as they were read. eagle: None without a draft."""

    target: LoadedTarget
    eagle: LoadedEagle | None
    drafting: Drafting


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerPlan:
    """Says what a runner is built for, where no memory is planned.

    is_captured: as graphs; compiles_ahead: all kernels, and graphs of steps as large as it pays
    """

    sizes: EngineSizes
    graphs: GraphConfig
    is_captured: bool
    compiles_ahead: bool
    confidence_threshold: float | None


def read_models(found: Found, config: EngineConfig, ranks: Ranks) -> Models:
    """Read a rank's weights, and meet the others before the draft's, of which all agree."""
    device, progress = device_of(config.device), config.use_tqdm_on_load
    drafting = found.drafting
    with phase("target weights"):
        dtype = dtype_of(config.dtype, device)
        target = load_target(
            found.target, dtype=dtype, device=device, progress=progress, shard=ranks.shard
        )
    logger.info("%s", target.report)
    ranks.join(device)
    eagle = None
    if found.speculation is not None and found.draft is not None:
        with phase("draft weights"):
            eagle = _read_draft(found.draft, found.speculation, target, progress, ranks)
        logger.info("%s", eagle.report)
        drafting = of_checkpoint(drafting, found.speculation, eagle.config)
        refuse_pieces(config, eagle.config)
    return Models(target=target, eagle=eagle, drafting=drafting)


def build_runner(
    config: EngineConfig,
    speculation: SpeculativeConfig | None,
    models: Models,
    backend: GraphBackend | None,
    ranks: Ranks,
) -> Runner:
    """Build the runner with a cache that fits, its graphs captured."""
    target, eagle, drafting = models.target, models.eagle, models.drafting
    embedding = target.tensors["embed_tokens.weight"]
    device, dtype = embedding.device, embedding.dtype
    of_draft = None if eagle is None else eagle.config
    products = products_of(target.config, of_draft, dtype_name(dtype))
    log_tiles(products, experts_of(target.config), device)
    most = largest_sizes(config, drafting, target.config, of_draft)
    if most.max_num_seqs < config.max_num_seqs:
        logger.info("max_num_seqs=%d, the most with draft trees", most.max_num_seqs)
    target = replace(target, config=target.config.within(most.max_model_len))
    if eagle is not None:
        eagle = replace(eagle, config=eagle.config.within(most.max_model_len))
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
        exchange=ranks.exchange,
        acceptance="exact" if speculation is None else speculation.acceptance,
        confidence_threshold=drafting.confidence_threshold,
    )
    has_graphs = backend is not None
    if device.type == "cuda":
        with phase("kernels"), frozen_heap():
            progress = config.use_tqdm_on_load
            build = compiled(build, most, config.graphs, has_graphs, progress, ranks)
    if device.type == "cuda" and config.num_kv_blocks is None:
        tensors = [x for model in (target, eagle) if model for x in model.tensors.values()]
        with phase("memory plan"):
            needs = measure_needs(build, most, tensors, block, target.local.vocab_size)
        needs = of_all_ranks(needs, ranks.least)
        blocks = plan_memory(needs, config.utilization, most)
        logger.info("memory:\n%s", memory_table(needs, config.utilization, blocks))
    else:
        num_beside = ranks.size if device.type == "cpu" else 1
        blocks = _num_blocks(config, most, block, device_memory(device) // num_beside)
    with phase("cache, graphs"), frozen_heap() if has_graphs else nullcontext():
        runner = build(replace(most, num_kv_blocks=ranks.least(blocks)))
        runner.capture()
    return runner


def build_planned(models: Models, plan: RunnerPlan, device: torch.device, ranks: Ranks) -> Runner:
    """Build a runner of given sizes, its graphs captured; all ranks do."""
    build = partial(
        Runner,
        models.target,
        models.eagle,
        device=device,
        graph_config=plan.graphs,
        backend=CudaBackend(device) if plan.is_captured else None,
        exchange=ranks.exchange,
        confidence_threshold=plan.confidence_threshold,
    )
    if plan.compiles_ahead:
        build = compiled(build, plan.sizes, plan.graphs, plan.is_captured, ranks=ranks)
    runner = build(plan.sizes)
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
    ranks.beside_first(partial(compile_ahead, trial, progress))
    if not has_graphs or not graphs.captures_pieces_by_default:
        return build
    max_tokens = ranks.led(trial, partial(largest_captured, trial))
    return partial(build, graph_config=replace(graphs, max_tokens=max_tokens))


def graph_backend(
    config: EngineConfig, device: torch.device, has_draft: bool
) -> GraphBackend | None:
    """Choose what captures, None for eager runs; ValueError for options that would do nothing."""
    if device.type != "cuda":
        config.refuse_graph_options(f"graphs are captured on a GPU only, not on device {device}")
        note_gpu_memory(config.gpu_memory_utilization, device)
        return None
    config.refuse_unused_graph_options(has_draft)
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current one
    return None if config.enforce_eager else CudaBackend(device)


def _read_draft(
    directory: Path,
    speculation: SpeculativeConfig,
    target: LoadedTarget,
    progress: bool,
    ranks: Ranks,
) -> LoadedEagle:
    device = target.tensors["embed_tokens.weight"].device
    aux_layers = None if speculation.aux_layers is None else tuple(speculation.aux_layers)
    eagle = load_eagle(
        directory,
        target,
        device=device,
        aux_layers=aux_layers,
        progress=progress,
        shard=WHOLE if speculation.draft_tensor_parallel_size == 1 else target.shard,
        agree=lambda holds: ranks.least(int(holds)) == 1,
    )
    check_method(speculation, eagle.config)
    return eagle


def check_method(speculation: SpeculativeConfig, draft: DraftConfig) -> None:
    """Refuse a draft of another method than was asked for."""
    method = draft.method
    if speculation.method not in ("auto", method):
        kind = f"{'an' if method.startswith('e') else 'a'} {method} draft"
        raise ValueError(
            f"method={speculation.method!r}, but {speculation.model} is {kind} (format "
            f"{draft.format}); give method='auto' or method={method!r}"
        )


def refuse_pieces(config: EngineConfig, draft: DraftConfig) -> None:
    """Refuse graphs in pieces alone of a draft that has none: its prompts take a few products."""
    family, mode = "draft_prefill", "PIECEWISE"
    if draft.context_width and (config.cuda_graph_modes or {}).get(family) == mode:
        given = f"cuda_graph_modes[{family!r}]={mode!r}"
        why = f"a {draft.method} draft is captured after rounds alone, as a whole"
        raise ValueError(f"{given}: {why}: give 'NONE' or 'FULL_DECODE_ONLY', or leave it out")


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


@contextmanager
def phase(name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    logger.info("start: %-15s %6.2f s", name, time.monotonic() - start)
