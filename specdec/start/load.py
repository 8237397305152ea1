"""From what a user chose to a runner that is ready: weights read, memory planned, graphs captured.

Each phase says at the log level "info" how long it took.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from graphs.cuda import CudaBackend
from graphs.protocol import GraphBackend
from specdec.config import MAX_MODEL_LEN, EngineConfig, SpeculativeConfig
from specdec.engine import Engine
from specdec.models.kv_cache import bytes_per_block
from specdec.requests.tokenizer import Tokenizer
from specdec.runner import Runner
from specdec.sizes import BLOCK_SIZE, EngineSizes
from specdec.start.assemble import assemble
from specdec.start.locate import locate
from specdec.start.memory import (
    GIB,
    blocks_in_host_memory,
    check_length,
    device_memory,
    measure_needs,
    plan_memory,
)
from weights.errors import Problems
from weights.files.reader import Reader
from weights.load import LoadedEagle, LoadedTarget, load_eagle, load_target
from weights.report import Log
from weights.target import resolve_target

logger = logging.getLogger("specdec")

MOST_PREFIXES = 4  # times what all rows together can hold: the cache is never larger than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The models as they were read, and what runs them."""

    target: LoadedTarget
    eagle: LoadedEagle | None
    tokenizer: Tokenizer
    engine: Engine


def load(model: str | Path, speculation: SpeculativeConfig | None, config: EngineConfig) -> Loaded:
    """ValueError for what does not fit together or on the device; weights.CheckpointError for files."""
    device = device_of(config.device)
    has_draft = speculation is not None and speculation.num_speculative_tokens > 0
    backend, dtype = _backend(config, device, has_draft), dtype_of(config.dtype, device)
    directory = locate(model, "target")
    draft_directory = None if speculation is None else locate(speculation.model, "draft")
    resolve_target(
        Reader(directory), Log(), Problems(directory)
    )  # what is no target says so, and has no tokenizer
    with _phase("tokenizer"):
        tokenizer = Tokenizer(directory)  # before the weights, which take longer
    with _phase("target weights"):
        target = load_target(
            directory, dtype=dtype, device=device, progress=config.use_tqdm_on_load
        )
    logger.info("%s", target.report)
    eagle = None
    if speculation is not None and draft_directory is not None:
        with _phase("draft weights"):
            eagle = _load_draft(
                draft_directory, speculation, target, device, config.use_tqdm_on_load
            )
        logger.info("%s", eagle.report)
    runner = _runner(config, speculation, target, eagle, device, backend)
    engine = assemble(
        runner,
        target.config,
        tokenizer,
        seed=config.seed,
        use_prefix_cache=config.enable_prefix_caching,
        is_async=config.async_scheduling,
    )
    return Loaded(target=target, eagle=eagle, tokenizer=tokenizer, engine=engine)


@contextmanager
def _phase(name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    logger.info("start: %-15s %6.2f s", name, time.monotonic() - start)


def device_of(name: object) -> torch.device:
    """ "auto" is a GPU if there is one. ValueError for what cannot be used here."""
    assert isinstance(name, str | torch.device), type(name)
    if isinstance(name, str) and name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={name!r}: give auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch sees no CUDA device here; give cpu or auto")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ValueError(f"device={name!r}: give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype | None:
    """None: as stored. On the CPU "auto" is float32."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _backend(config: EngineConfig, device: torch.device, has_draft: bool) -> GraphBackend | None:
    """None: everything runs eagerly, as it always does on the CPU. ValueError for options that would do nothing."""
    if device.type != "cuda":
        config.refuse_graph_options(f"graphs are captured on a GPU only, not on device {device}")
        config.refuse_gpu_memory(device)
        return None
    config.refuse_unused_graph_options(has_draft)
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current one
    return None if config.enforce_eager else CudaBackend(device)


def _load_draft(
    directory: Path,
    speculation: SpeculativeConfig,
    target: LoadedTarget,
    device: torch.device,
    progress: bool,
) -> LoadedEagle:
    eagle = load_eagle(
        directory, target, device=device, aux_layers=speculation.aux_layers, progress=progress
    )
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
    target: LoadedTarget,
    eagle: LoadedEagle | None,
    device: torch.device,
    backend: GraphBackend | None,
) -> Runner:
    """The runner with a cache that fits, its graphs captured."""
    most = _sizes(config, speculation, target, eagle)
    build = partial(
        Runner, target, eagle, device=device, graph_config=config.graphs, backend=backend
    )
    if speculation is not None:
        build = partial(build, acceptance=speculation.acceptance)
    models: list[LoadedTarget | LoadedEagle] = [target] if eagle is None else [target, eagle]
    dtype = target.tensors["embed_tokens.weight"].dtype
    cached = models if most.num_speculative_tokens > 0 else [target]
    block = sum(
        bytes_per_block(model.config.layer, model.config.num_layers, dtype) for model in cached
    )
    if config.max_model_len is None:
        check_length(most, block, device_memory(device))
    if config.num_kv_blocks is None and device.type == "cuda":
        tensors = [tensor for model in models for tensor in model.tensors.values()]
        with _phase("memory plan"):
            flags = measure_needs(build, most, tensors, block, target.config.vocab_size)
        plan = plan_memory(flags, config.utilization, most)
        logger.info("memory:\n%s", plan.table())
        runner = _captured(build, replace(most, num_kv_blocks=plan.num_kv_blocks))
        plan.report_pools(runner.graphs.counters())
        return runner
    if config.num_kv_blocks is None:
        blocks = min(most.num_kv_blocks // _cache_factor(config), blocks_in_host_memory(block))
    else:
        blocks = config.num_kv_blocks
        _check_cache(config, blocks * block, device)
    return _captured(build, replace(most, num_kv_blocks=blocks))


def _check_cache(config: EngineConfig, num_bytes: int, device: torch.device) -> None:
    """The cache that was asked for: less than all memory there is, and in place of a share of it."""
    memory = device_memory(device)
    if num_bytes >= memory:
        raise ValueError(
            f"num_kv_blocks={config.num_kv_blocks} take {num_bytes / GIB:.2f} GiB, and there are {memory / GIB:.2f} "
            "GiB: give fewer, or leave it out"
        )
    if config.gpu_memory_utilization is not None:
        logger.info(
            "num_kv_blocks=%d overrides gpu_memory_utilization=%g",
            config.num_kv_blocks,
            config.gpu_memory_utilization,
        )


def _captured(build: Callable[[EngineSizes], Runner], sizes: EngineSizes) -> Runner:
    with _phase("cache, graphs"):
        runner = build(sizes)
        runner.capture()
    return runner


def _sizes(
    config: EngineConfig,
    speculation: SpeculativeConfig | None,
    target: LoadedTarget,
    eagle: LoadedEagle | None,
) -> EngineSizes:
    """Sizes with as many cache blocks as are of use at most: what all rows together can hold, and with a prefix cache
    several times that for what ended requests leave."""
    max_model_len = _max_model_len(config.max_model_len, target.config.max_position_embeddings)
    num_speculative_tokens = speculation.num_speculative_tokens if speculation is not None else 0
    _check_window("target", target.config.sliding_window, max_model_len)
    if eagle is not None and num_speculative_tokens > 0:
        _check_window("draft", eagle.config.sliding_window, max_model_len)
    return EngineSizes(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_kv_blocks=config.max_num_seqs * -(-max_model_len // BLOCK_SIZE) * _cache_factor(config),
        num_speculative_tokens=num_speculative_tokens,
    )


def _max_model_len(given: int | None, longest: int) -> int:
    """The length asked for, else the target's longest, as long as an engine may be built for it."""
    if given is not None and given > longest:
        raise ValueError(
            f"max_model_len={given} exceeds the target's max_position_embeddings={longest}"
        )
    if given is None and longest > MAX_MODEL_LEN:
        raise ValueError(
            f"the target's max_position_embeddings={longest} is more than an engine takes: "
            f"give a max_model_len of at most {MAX_MODEL_LEN}"
        )
    return longest if given is None else given


def _cache_factor(config: EngineConfig) -> int:
    return MOST_PREFIXES if config.enable_prefix_caching else 1


def _check_window(role: str, window: int | None, max_model_len: int) -> None:
    if window is not None and max_model_len > window:
        raise ValueError(
            f"the {role} attends over a sliding window of {window} tokens, which is not supported beyond it: "
            f"give max_model_len={window} or less (max_model_len={max_model_len})"
        )
