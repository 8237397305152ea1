"""From a caller's choices to an engine that is ready: weights, a memory plan, graphs.

Each phase logs how long it took, at level "info".
"""

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdec.config import MAX_PROMPT_SLOWDOWN, EngineConfig
from specdec.engine import Engine
from specdec.guided.guides import Guides
from specdec.kernels.compilations import (
    compiling_is_expected,
    hashing_compiler,
    log_compilations,
)
from specdec.kernels.tables import user_table
from specdec.parallel.begin import Found, check_ranks, leading
from specdec.parallel.equal_bits import draft_fit_of, fit_of
from specdec.parallel.ranks import ALONE, Ranks
from specdec.requests.intake import Intake
from specdec.requests.tokenizer import Tokenizer
from specdec.runner import Runner
from specdec.scheduling.costs import PromptBudget
from specdec.scheduling.planner import Planner
from specdec.speculative_config import SpeculativeConfig
from specdec.start.device import advise_threads, device_memory, device_of, dtype_of, release_memory
from specdec.start.locate import hub_of, locate, locate_tokenizer
from specdec.start.measure_costs import NEVER, measure_costs, measure_round_costs
from specdec.start.runners import (
    RunnerPlan,
    build_planned,
    build_runner,
    check_method,
    graph_backend,
    phase,
    read_models,
)
from specdec.start.sizing import (
    check_forms,
    check_target,
    check_tokenizer,
    check_weights,
    largest_sizes,
)
from specdec.start.speculation import Drafting, drafting_of
from weights.config import TargetConfig
from weights.draft.config import DraftConfig
from weights.files.reader import Reader
from weights.load import LoadedEagle, LoadedTarget, bind_eagle, bind_target
from weights.ranks import KEEP_WHOLE, check_draft_ranks, check_target_ranks
from weights.report import Log
from weights.target import resolve_target

logger = logging.getLogger("specdec")

OTHER_BITS = "%s: tokens may differ from those of one GPU: %s"


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
) -> Loaded:
    """Load everything and build the engine.

    ValueError for what does not fit together or on the device; weights.CheckpointError for files;
    RankError if another rank cannot load.
    """
    size = config.tensor_parallel_size
    check_draft_size(speculation, size)
    if size > 1:
        config = replace(config, device=check_ranks(device_of(config.device), size))
    device = device_of(config.device)
    advise_threads(device)
    has_draft = speculation is not None and speculation.num_speculative_tokens != 0
    backend = graph_backend(config, device, has_draft)
    drafting = drafting_of(speculation, backend is not None)
    if device.type == "cuda":
        hashing_compiler()
        user_table()  # a faulty one is refused before weights are read
    found, tokenizer_directory = _locate(model, speculation, config, drafting)
    vocab_size = _check_target(found, config, device)
    check_parts(found, size)
    with leading(found, config) as lead:
        with phase("tokenizer"):
            tokenizer = Tokenizer(tokenizer_directory)
            if vocab_size is not None:
                check_tokenizer(tokenizer_directory, tokenizer, vocab_size)
        ranks = ALONE if lead is None else lead
        models = read_models(found, config, ranks)
        if lead is not None:
            lead.build(None)
        runner = build_runner(config, speculation, models, backend, ranks)
        runner.followers = lead
        engine = assemble(
            runner,
            models.target.config,
            tokenizer,
            seed=config.seed,
            use_prefix_cache=config.enable_prefix_caching,
            is_async=config.async_scheduling,
            slowdown=config.max_prompt_slowdown,
        )
        if lead is not None:
            with phase("other ranks"):
                lead.serve()
    if device.type == "cuda":
        log_compilations()
    return Loaded(target=models.target, eagle=models.eagle, tokenizer=tokenizer, engine=engine)


def _locate(
    model: str | Path,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
    drafting: Drafting,
) -> tuple[Found, Path]:
    """Find the directories of target and draft, and the tokenizer's, before any is read."""
    hub = hub_of(config)
    directory = locate(model, "target", hub)
    tokenizer_directory = locate_tokenizer(model, config, directory)
    draft_directory = None
    if speculation is not None:
        draft_hub = replace(hub, revision=speculation.revision)
        draft_directory = locate(speculation.model, "draft", draft_hub)
    return Found(directory, draft_directory, speculation, drafting), tokenizer_directory


def _check_target(found: Found, config: EngineConfig, device: torch.device) -> int | None:
    """Refuse sizes that no engine has; return the vocabulary's, None for files with problems.

    A directory that is no target says so here, not by the tokenizer that it lacks. Reading the
    weights lists all problems at once.
    """
    reader = Reader(found.target)
    target = resolve_target(reader, Log())
    if reader.problems.lines:
        return None
    check_target(found.target, target, config.max_model_len)
    check_forms(target, device)
    largest_sizes(config, found.drafting, target, None)  # refuses a length early
    num_devices = config.tensor_parallel_size if device.type == "cuda" else 1
    memory = device_memory(device)
    check_weights(reader, dtype_of(config.dtype, device), memory, num_devices)
    return target.vocab_size


def check_draft_size(speculation: SpeculativeConfig | None, size: int) -> None:
    """Refuse a draft on another number of ranks than the target or each one: ValueError."""
    given = None if speculation is None else speculation.draft_tensor_parallel_size
    if given not in (None, 1, size):
        allowed = "give 1, for a whole draft on each GPU" + f", or {size}" * (size > 1)
        both = f"draft_tensor_parallel_size={given} with tensor_parallel_size={size}"
        raise ValueError(f"{both}: {allowed}")


def check_parts(found: Found, size: int) -> None:
    """Refuse files, and parts of them, that no rank could read: before others are started."""
    if size == 1:  # which reading refuses
        return
    reader = Reader(found.target)
    target, _, _ = bind_target(reader, Log())
    reader.problems.raise_if_any()
    check_target_ranks(target, size)
    fit = fit_of(target, size)
    given = f"tensor_parallel_size={size}"
    if fit.bits == "none":
        raise ValueError(f"{given}: {fit.reason} cannot be dealt out to so many: give fewer")
    if fit.bits == "other":
        logger.warning(OTHER_BITS, given, fit.reason)
    speculation = found.speculation
    if found.draft is None or speculation is None:
        return
    aux_layers = None if speculation.aux_layers is None else tuple(speculation.aux_layers)
    resolution, _ = bind_eagle(Reader(found.draft), target, aux_layers, Log())
    check_method(speculation, resolution.config)
    if speculation.draft_tensor_parallel_size != 1:
        check_draft_parts(resolution.config, size, speculation.acceptance)


def check_draft_parts(config: DraftConfig, size: int, acceptance: str) -> None:
    """Refuse a draft that cannot be cut for so many ranks."""
    check_draft_ranks(config, size)
    fit = draft_fit_of(config, size)
    given = f"draft_tensor_parallel_size={size}"
    if fit.bits == "none":
        raise ValueError(f"{given}: the draft's {fit.reason} cannot be dealt out; {KEEP_WHOLE}")
    if fit.bits == "other" and acceptance != "exact":
        logger.warning(OTHER_BITS, f"{given}, acceptance={acceptance!r}", fit.reason)


def load_rank(
    found: Found, config: EngineConfig, ranks: Ranks
) -> Callable[[RunnerPlan | None], Runner]:
    """Read the models of another rank; return what builds runners as rank 0 does.

    It takes a plan, or None for a runner as the config asks for it.
    """
    device = device_of(config.device)
    backend = graph_backend(config, device, found.has_draft)
    if device.type == "cuda":
        hashing_compiler()
    models = read_models(found, config, ranks)

    @compiling_is_expected()
    def build(plan: RunnerPlan | None) -> Runner:
        if plan is None:
            return build_runner(config, found.speculation, models, backend, ranks)
        release_memory()  # of the runner before
        return build_planned(models, plan, device, ranks)

    return build


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
    engine = Engine(
        runner,
        intake,
        use_prefix_cache=use_prefix_cache,
        num_steps_ahead=int(is_gpu if is_async is None else is_async),
        budget=None if costs is None else PromptBudget(costs=costs, slowdown=slowdown),
        planner=planner,
    )
    if runner.followers is not None:
        _end_ranks_at_exit(engine)
    return engine


def _end_ranks_at_exit(engine: Engine) -> None:
    """End ranks before the interpreter does: NCCL waits for graphs, which nothing frees later."""
    found, owner = weakref.ref(engine), os.getpid()

    def end() -> None:
        running = found()
        if running is not None and os.getpid() == owner:  # a forked child has copies of all this
            running.end_ranks()

    atexit.register(end)
    weakref.finalize(engine, atexit.unregister, end).atexit = False


def _tokenizers_eos(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Take the tokenizer's EOS token where no config of the checkpoint has one, as in vLLM."""
    found = tokenizer.eos_token_id
    if found is None or found >= vocab_size:  # which the target never draws
        return ()
    logger.info("eos_token_id=%d: the tokenizer's, since the checkpoint's configs have none", found)
    return (found,)
