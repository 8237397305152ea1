"""The public class: load a target and perhaps a draft, generate text."""

import logging
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from graphs.backend import CudaBackend
from graphs.protocol import GraphBackend
from specdec.arguments import refuse_unknown
from specdec.config import EngineConfig, SpeculativeConfig
from specdec.deltas import Deltas
from specdec.engine import Engine
from specdec.intake import Asked, Intake, Prompt
from specdec.kv_cache import BLOCK_SIZE, bytes_per_block
from specdec.locate import locate
from specdec.memory import blocks_in_host_memory, measure_needs, plan_memory
from specdec.output import CompletionOutput, RequestOutput
from specdec.progress import Progress
from specdec.request import Request
from specdec.runner import Runner, RunnerSizes
from specdec.sampling import SamplingParams
from specdec.stats import SpeculationStats
from specdec.tokenizer import Conversation, Tokenizer
from weights.load import LoadedEagle, LoadedTarget, load_eagle, load_target

logger = logging.getLogger("specdec")

MOST_PREFIXES = 4  # times what all rows together can hold: the cache is never larger than that


class LLM:
    """Generates from a target, with the drafts of `speculative_config` if given; they never change the output.

    model: a local directory, a hub id, or "demo", the bundled pair. The other arguments are those of EngineConfig.
    ValueError for arguments that are unknown or do not fit; weights.CheckpointError for files that do not.
    """

    def __init__(
        self,
        model: str | Path,
        speculative_config: SpeculativeConfig | Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        refuse_unknown("LLM", options, EngineConfig.__dataclass_fields__)
        config = EngineConfig(**options)  # type: ignore[arg-type]
        speculation = SpeculativeConfig.of(speculative_config)
        device = _device(config.device)
        backend = _backend(config, device)
        dtype = _dtype(config.dtype, device)

        directory = locate(model, "target")
        draft_directory = None if speculation is None else locate(speculation.model, "draft")
        target = load_target(directory, dtype=dtype, device=device, progress=config.use_tqdm_on_load)
        eagle = None
        if speculation is not None and draft_directory is not None:
            eagle = _load_draft(draft_directory, speculation, target, device, config.use_tqdm_on_load)
        self.config, self.speculative_config = config, speculation
        self.target_report, self.draft_report = target.report, None if eagle is None else eagle.report
        self.tokenizer = Tokenizer(directory)
        runner = _runner(config, speculation, target, eagle, device, backend)
        self.sizes = runner.sizes
        intake = Intake(
            self.tokenizer,
            runner.sizes,
            target.config.vocab_size,
            target.config.eos_token_ids,
            config.seed,
            runner.acceptance,
        )
        is_async = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        self.engine = Engine(
            runner, intake, use_prefix_cache=config.enable_prefix_caching, num_steps_ahead=int(is_async)
        )
        logger.info("target: %s", target.report)
        if eagle is not None:
            logger.info("draft: %s", eagle.report)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt (text or token ids) or several; results in the order of the prompts.

        sampling_params: one for all, or one per prompt. priority: one per prompt, lower goes first. All requests are
        checked before any runs; one that fails later ends with finish_reason "error", and the others go on.
        use_tqdm: show on a terminal how many are done, tokens per second and the acceptance length.
        """
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        priorities = _as_priorities(priority, len(batch))
        asked = [
            Asked(prompt=prompt, params=each, priority=first)
            for prompt, each, first in zip(batch, params, priorities, strict=True)
        ]
        requests = self.engine.add_requests(asked)
        is_shown = use_tqdm and sys.stderr.isatty()
        with Progress(requests, is_shown=is_shown) as progress, self._aborted_on_error(requests):
            while not progress.is_complete:
                progress.update(self.engine.step())
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role": ..., "content": ...}) or several.

        The tokenizer's chat template writes them, or `chat_template`, Jinja text. ValueError where there is neither.
        """
        encode = self.tokenizer.encode_chat
        prompts = [encode(each, add_generation_prompt, chat_template) for each in _as_conversations(messages)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[CompletionOutput, None, RequestOutput]:
        """Generate for one prompt and yield what is new as rounds commit: text, token ids and logprobs of one sample.

        Joined, the texts of a sample are its whole text. The last piece of each has a finish_reason. Leaving the
        iterator early aborts the request. The generator's return value is the whole output.
        """
        [request] = self.engine.add_requests([Asked(prompt=prompt, params=sampling_params or SamplingParams())])
        pieces = self._pieces(request)
        next(pieces)  # the generator has begun, so that leaving it aborts the request before its first piece too
        return pieces

    def _pieces(self, request: Request) -> Generator[CompletionOutput, None, RequestOutput]:
        deltas = Deltas(request)
        with self._aborted_on_error([request]):
            yield CompletionOutput(index=0, text="", token_ids=[])  # for stream(), not for its caller
            while not request.is_finished:
                self.engine.step()
                yield from deltas.new()
        return request.output()

    @contextmanager
    def _aborted_on_error(self, requests: Sequence[Request]) -> Iterator[None]:
        """However the body ends, none of its requests runs on."""
        try:
            yield
        finally:
            for request in requests:
                self.engine.abort(request.request_id)

    @staticmethod
    def run_stats(outputs: Sequence[RequestOutput]) -> SpeculationStats:
        """The rounds of all outputs as one run."""
        return SpeculationStats.merged(output.stats for output in outputs)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: give auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch sees no CUDA device here; give cpu or auto")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    """None: as stored. On the CPU "auto" is float32."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _backend(config: EngineConfig, device: torch.device) -> GraphBackend | None:
    """None: everything runs eagerly, as it always does on the CPU."""
    if device.type != "cuda":
        config.refuse_graph_options(f"graphs are captured on a GPU only, not on device {device}")
        return None
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current one
    return None if config.enforce_eager else CudaBackend(device)


def _load_draft(
    directory: Path, speculation: SpeculativeConfig, target: LoadedTarget, device: torch.device, progress: bool
) -> LoadedEagle:
    eagle = load_eagle(directory, target, device=device, aux_layers=speculation.aux_layers, progress=progress)
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
    build = partial(Runner, target, eagle, device=device, graph_config=config.graphs, backend=backend)
    if speculation is not None:
        build = partial(build, acceptance=speculation.acceptance)
    models: list[LoadedTarget | LoadedEagle] = [target] if eagle is None else [target, eagle]
    dtype = target.tensors["embed_tokens.weight"].dtype
    cached = models if most.num_speculative_tokens > 0 else [target]
    block = sum(bytes_per_block(model.config.layer, model.config.num_layers, dtype) for model in cached)
    if config.num_kv_blocks is None and device.type == "cuda":
        tensors = [tensor for model in models for tensor in model.tensors.values()]
        needs = measure_needs(build, most, tensors, block, target.config.vocab_size)
        plan = plan_memory(needs, config.gpu_memory_utilization, most)
        logger.info("memory:\n%s", plan.table())
        runner = build(replace(most, num_kv_blocks=plan.num_kv_blocks))
        runner.capture()
        plan.report_pools(runner.graphs.counters())
        return runner
    blocks = config.num_kv_blocks or min(most.num_kv_blocks // _cache_factor(config), blocks_in_host_memory(block))
    runner = build(replace(most, num_kv_blocks=blocks))
    runner.capture()
    return runner


def _sizes(
    config: EngineConfig, speculation: SpeculativeConfig | None, target: LoadedTarget, eagle: LoadedEagle | None
) -> RunnerSizes:
    """Sizes with as many cache blocks as are of use at most: what all rows together can hold, and with a prefix cache
    several times that for what ended requests leave."""
    max_model_len = config.max_model_len or target.config.max_position_embeddings
    num_speculative_tokens = speculation.num_speculative_tokens if speculation is not None else 0
    if max_model_len > target.config.max_position_embeddings:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the target's max_position_embeddings="
            f"{target.config.max_position_embeddings}"
        )
    _check_window("target", target.config.sliding_window, max_model_len)
    if eagle is not None and num_speculative_tokens > 0:
        _check_window("draft", eagle.config.sliding_window, max_model_len)
    return RunnerSizes(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_kv_blocks=config.max_num_seqs * -(-max_model_len // BLOCK_SIZE) * _cache_factor(config),
        num_speculative_tokens=num_speculative_tokens,
    )


def _cache_factor(config: EngineConfig) -> int:
    return MOST_PREFIXES if config.enable_prefix_caching else 1


def _check_window(role: str, window: int | None, max_model_len: int) -> None:
    if window is not None and max_model_len > window:
        raise ValueError(
            f"the {role} attends over a sliding window of {window} tokens, which is not supported beyond it: "
            f"give max_model_len={window} or less (max_model_len={max_model_len})"
        )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [[item for item in items if isinstance(item, int)]]
    batch: list[Prompt] = []
    for index, item in enumerate(items):
        if isinstance(item, int) or not isinstance(item, str | Sequence):
            raise ValueError(f"prompts[{index}] is {item!r}: give text or a list of token ids")
        batch.append(item)
    return batch


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """A list that begins with a list is several conversations; whether each is one is checked where it is encoded."""
    is_several = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
    return list(cast(Sequence[Conversation], messages)) if is_several else [cast(Conversation, messages)]


def _as_params(sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    params = list(sampling_params)
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one, or one for each")
    return params


def _as_priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    priorities = [0] * count if priority is None else list(priority)
    if len(priorities) != count or any(not isinstance(value, int) for value in priorities):
        raise ValueError(f"priority={priority!r} for {count} prompts: give one integer for each, or None")
    return priorities
