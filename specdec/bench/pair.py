"""A target and a draft, loaded once, and the engines built over their tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from graphs.cuda import CudaBackend
from specdec.config import EngineConfig, GraphConfig, graph_modes
from specdec.engine import Engine
from specdec.kernels.compilations import log_compilations
from specdec.requests.tokenizer import Tokenizer
from specdec.runner import Runner
from specdec.sizes import BLOCK_SIZE, EngineSizes, TreeShape
from specdec.start.device import device_of, dtype_of, note_gpu_memory, release_memory
from specdec.start.load import assemble, compiled
from specdec.start.locate import locate
from weights.demo import demo_prompts
from weights.errors import Problems
from weights.files.guard import read_object
from weights.load import LoadedEagle, LoadedTarget, load_eagle, load_target

NO_PREFILL_GRAPHS = {"target_prefill": "NONE", "draft_prefill": "FULL_DECODE_ONLY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is built for. K = 0 is plain decoding.

    is_adaptive: K is the most drafts, and as many are made as pay; on a GPU with graphs. tree: of K
    levels, with is_adaptive where it pays; None: chains. confidence_threshold: of the draft, 0: it
    never stops; with is_adaptive it is the one that pays.
    max_tokens: prompt and answer of a request, in the mean at least: the cache has room for
    max_num_seqs of them; None: max_model_len. request_sizes: of full graphs; None: the default
    ones. has_prefill_graphs: off, since few suites time prompts and
    capturing takes time.
    """

    num_speculative_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_tokens: int | None = None
    request_sizes: tuple[int, ...] | None = None
    has_prefill_graphs: bool = False
    compile_piecewise: bool = False
    enforce_eager: bool = False
    is_adaptive: bool = False
    tree: TreeShape | None = None
    confidence_threshold: float = 0.0


@dataclass(slots=True, eq=False)
class Pair:
    """eagle: None if only plain decoding is measured. config: what a user chose for all engines."""

    target: LoadedTarget
    eagle: LoadedEagle | None
    tokenizer: Tokenizer
    prompts: list[list[int]]
    device: torch.device
    config: EngineConfig
    _engines: dict[EngineSpec, Engine] = field(default_factory=dict)

    def engine(self, spec: EngineSpec, keep: int = 2) -> Engine:
        """A new engine or a kept one. Keep the last `keep` others."""
        engine = self._engines.pop(spec, None)
        while len(self._engines) > keep:
            self.drop(next(iter(self._engines)))
        self._engines[spec] = engine = engine or build_engine(self, spec)
        return engine

    def drop(self, spec: EngineSpec | None = None) -> None:
        """Free the memory of one engine, if it was built, or of all."""
        for each in list(self._engines):
            if spec in (None, each):
                self._engines.pop(each).runner.graphs.clear_all_graphs()
        release_memory()


def load_pair(
    target: str,
    draft: str | None,
    device: str,
    dtype: str,
    prompts: Path | None = None,
    **engine: object,
) -> Pair:
    """dtype auto: as stored on a GPU, float32 on the CPU. prompts: a file like prompts.json.

    engine: seed and enforce_eager, of every engine, and gpu_memory_utilization, of those of LLM.
    """
    config = EngineConfig(device=device, dtype=dtype, **engine)  # type: ignore[arg-type]
    where = device_of(config.device)
    if where.type == "cuda":
        log_compilations(is_quiet=True)
    else:
        note_gpu_memory(config.gpu_memory_utilization, where)
    directory = locate(target, "target")
    texts = read_prompts(directory, prompts)
    loaded = load_target(directory, dtype=dtype_of(config.dtype, where), device=where)
    eagle = None if draft is None else load_eagle(locate(draft, "draft"), loaded, device=where)
    tokenizer = Tokenizer(directory)
    return Pair(loaded, eagle, tokenizer, texts, where, config)


def read_prompts(target: Path, file: Path | None) -> list[list[int]]:
    """Token ids: from the file, prompts.json beside the target, or the bundled pair."""
    beside = target.parent / "prompts.json"
    file = file or (beside if beside.is_file() else None)
    try:
        prompts = (_read_object(file) if file else demo_prompts())["prompts"]
        assert isinstance(prompts, list), type(prompts)
    except (ValueError, LookupError, TypeError, AssertionError) as error:
        raise ValueError(
            f'{file}: give JSON, {{"prompts": [[token ids of one], ...]}}: {error}'
        ) from error
    return prompts


def _read_object(file: Path) -> dict[str, object]:
    """The JSON object in a regular file of bounded size. ValueError: it is none."""
    problems = Problems(file.parent)
    found = read_object(file, problems)
    if found is None:
        raise ValueError(problems.lines[0])
    return found


def build_engine(pair: Pair, spec: EngineSpec) -> Engine:
    """A new engine, with its graphs captured."""
    K = spec.num_speculative_tokens
    B = spec.max_num_seqs
    blocks_per_request = -(-((spec.max_tokens or spec.max_model_len) + K + 1) // BLOCK_SIZE)
    sizes = EngineSizes(
        max_model_len=spec.max_model_len,
        max_num_seqs=B,
        max_num_batched_tokens=max(8192, B * (K + 1)),
        num_kv_blocks=B * blocks_per_request,
        num_speculative_tokens=K,
        is_adaptive=spec.is_adaptive,
        tree=spec.tree,
    )
    graphs = GraphConfig(
        modes=graph_modes(None if spec.has_prefill_graphs else NO_PREFILL_GRAPHS),
        request_sizes=spec.request_sizes,
        compile_piecewise=spec.compile_piecewise,
    )
    is_eager = spec.enforce_eager or pair.config.enforce_eager
    is_captured = pair.device.type == "cuda" and not is_eager
    if spec.is_adaptive and not is_captured:
        raise ValueError("--adaptive: costs are measured with graphs, on a GPU only")
    backend = CudaBackend(pair.device) if is_captured else None
    build = partial(
        Runner,
        pair.target,
        pair.eagle,
        device=pair.device,
        graph_config=graphs,
        confidence_threshold=None if spec.is_adaptive else spec.confidence_threshold,
    )
    if pair.device.type == "cuda" and spec.has_prefill_graphs:  # as users get it
        build = compiled(build, sizes, graphs, is_captured)
    runner = build(sizes, backend=backend)
    runner.capture()
    return assemble(runner, pair.target.config, pair.tokenizer, seed=pair.config.seed)


def turned(prompts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """One prompt of `length` tokens that begins with another one of the prompts."""
    first %= len(prompts)
    return joined([*prompts[first:], *prompts[:first]], length)


def joined(prompts: Sequence[Sequence[int]], length: int) -> list[int]:
    """One prompt of exactly `length` tokens: the prompts one after another, repeated."""
    tokens = [token for prompt in prompts for token in prompt]
    return (tokens * -(-length // len(tokens)))[:length]
