"""A target and a draft, loaded once: the engines built over their tensors, and what they weigh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.config import EngineConfig, GraphConfig, graph_modes
from specdec.engine import Engine
from specdec.kernels import triton
from specdec.kernels.compilations import log_compilations
from specdec.parallel.begin import Found, check_ranks, leading
from specdec.parallel.lead import Lead
from specdec.parallel.ranks import ALONE
from specdec.requests.tokenizer import Tokenizer
from specdec.sizes import BLOCK_SIZE, EngineSizes
from specdec.speculative_config import SpeculativeConfig
from specdec.start.device import device_of, note_gpu_memory, release_memory
from specdec.start.load import assemble, check_draft_size, check_parts
from specdec.start.locate import locate
from specdec.start.runners import Models, RunnerPlan, build_planned, read_models
from specdec.start.speculation import Drafting, check_number
from weights.demo import demo_prompts
from weights.errors import Problems
from weights.files.guard import read_object
from weights.load import LoadedEagle, LoadedTarget

PLAIN = Drafting(0)
HEAD = "lm_head.weight"
SELECTOR = "candidate_selector."
# a pass reads only a few rows of them: of markov_w2 those of candidates, where it drafts chains
TABLES = (
    *("embed_tokens.weight", "d2t", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    *(f"{SELECTOR}predecessor_codebook", f"{SELECTOR}successor_codebook"),
)
NO_PREFILL_GRAPHS = {"target_prefill": "NONE", "draft_prefill": "FULL_DECODE_ONLY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is built for.

    drafting: adaptive on a GPU with graphs only.
    max_tokens: prompt and answer of a request, in the mean at least: the cache has room for
    max_num_seqs of them; None: max_model_len. request_sizes: of full graphs; None: the default
    ones. has_prefill_graphs: off, since few suites time prompts and capturing takes time.
    """

    drafting: Drafting = PLAIN
    max_num_seqs: int
    max_model_len: int
    max_tokens: int | None = None
    request_sizes: tuple[int, ...] | None = None
    has_prefill_graphs: bool = False
    compile_piecewise: bool = False
    enforce_eager: bool = False


@dataclass(slots=True, eq=False)
class Pair:
    """eagle: None if only plain decoding is measured. config: what a user chose for all engines.

    lead: of the other ranks, which have a runner at a time; None: there is one GPU
    """

    target: LoadedTarget
    eagle: LoadedEagle | None
    tokenizer: Tokenizer
    prompts: list[list[int]]
    device: torch.device
    config: EngineConfig
    lead: Lead | None = None
    _engines: dict[EngineSpec, Engine] = field(default_factory=dict)

    def engine(self, spec: EngineSpec, keep: int = 2) -> Engine:
        """Build an engine, or take a kept one; keep the last `keep` others."""
        engine = self._engines.pop(spec, None)
        if self.lead is not None:
            keep = 0
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

    def close(self) -> None:
        """Free the engines, and end the other ranks if there are some: no engine can be built."""
        self.drop()
        if self.lead is not None:
            self.lead.end("the pair was closed")


def load_pair(
    target: str,
    draft: str | None,
    device: str,
    dtype: str,
    prompts: Path | None = None,
    draft_tensor_parallel_size: int | None = None,
    **engine: object,
) -> Pair:
    """Load both; dtype auto: as stored on a GPU, float32 on the CPU. prompts: like prompts.json.

    draft_tensor_parallel_size: of the draft, see SpeculativeConfig
    engine: seed and enforce_eager, of every engine, and gpu_memory_utilization, of those of LLM.
    """
    config = EngineConfig(device=device, dtype=dtype, **engine)  # type: ignore[arg-type]
    where, size = device_of(config.device), config.tensor_parallel_size
    if size > 1:
        where = torch.device(check_ranks(where, size))
        config = replace(config, device=str(where))
    if where.type == "cuda":
        log_compilations(is_quiet=True)
    else:
        note_gpu_memory(config.gpu_memory_utilization, where)
    directory = locate(target, "target")
    texts = read_prompts(directory, prompts)
    speculation = None
    if draft is not None:
        of_draft = draft_tensor_parallel_size
        speculation = SpeculativeConfig(draft, draft_tensor_parallel_size=of_draft)
    check_draft_size(speculation, size)
    eagle = None if draft is None else locate(draft, "draft")
    found = Found(directory, eagle, speculation, PLAIN)
    check_parts(found, size)
    with leading(found, config) as lead:
        models = read_models(found, config, ALONE if lead is None else lead)
        tokenizer = Tokenizer(directory)
    return Pair(models.target, models.eagle, tokenizer, texts, where, config, lead)


def read_prompts(target: Path, file: Path | None) -> list[list[int]]:
    """Read token ids: from the file, prompts.json beside the target, or the bundled pair."""
    beside = target.parent / "prompts.json"
    file = file or (beside if beside.is_file() else None)
    problems = Problems(target if file is None else file.parent)
    found = demo_prompts() if file is None else read_object(file, problems)
    prompts = (found or {}).get("prompts")
    if not isinstance(prompts, list):
        why = problems.lines[0] if problems.lines else 'no list "prompts"'
        raise ValueError(f'{file}: give JSON, {{"prompts": [[token ids of one], ...]}}: {why}')
    return prompts


def build_engine(pair: Pair, spec: EngineSpec) -> Engine:
    """Build a new engine, with its graphs captured."""
    drafting = spec.drafting
    K = drafting.num_tokens
    if pair.eagle is not None:
        check_number(K, pair.eagle.config)
    B = spec.max_num_seqs
    blocks_per_request = -(-((spec.max_tokens or spec.max_model_len) + K + 1) // BLOCK_SIZE)
    sizes = EngineSizes(
        max_model_len=spec.max_model_len,
        max_num_seqs=B,
        max_num_batched_tokens=max(8192, B * (K + 1)),
        num_kv_blocks=B * blocks_per_request,
        num_speculative_tokens=K,
        is_adaptive=drafting.is_adaptive,
        tree=drafting.tree,
        block_rows=0 if pair.eagle is None else pair.eagle.config.block_rows(K),
    )
    graphs = GraphConfig(
        modes=graph_modes(None if spec.has_prefill_graphs else NO_PREFILL_GRAPHS),
        request_sizes=spec.request_sizes,
        compile_piecewise=spec.compile_piecewise,
    )
    is_eager = spec.enforce_eager or pair.config.enforce_eager
    is_captured = pair.device.type == "cuda" and not is_eager
    if drafting.is_adaptive and not is_captured:
        raise ValueError("--adaptive: costs are measured with graphs, on a GPU only")
    plan = RunnerPlan(
        sizes=sizes,
        graphs=graphs,
        is_captured=is_captured,
        compiles_ahead=pair.device.type == "cuda" and spec.has_prefill_graphs,  # as users get it
        confidence_threshold=drafting.confidence_threshold,
    )
    models = Models(target=pair.target, eagle=pair.eagle, drafting=drafting)
    if pair.lead is not None:
        pair.lead.build(plan)
    runner = build_planned(models, plan, pair.device, pair.lead or ALONE)
    runner.followers = pair.lead
    engine = assemble(runner, pair.target.config, pair.tokenizer, seed=pair.config.seed)
    if pair.lead is not None:
        pair.lead.serve()
    return engine


def joined(prompts: Sequence[Sequence[int]], length: int, first: int = 0) -> list[int]:
    """Make one prompt of `length` tokens: the prompts from this one on, in turn, repeated."""
    first %= len(prompts)
    tokens = [token for prompt in (*prompts[first:], *prompts[:first]) for token in prompt]
    return (tokens * -(-length // len(tokens)))[:length]


@dataclass(frozen=True, slots=True)
class Bytes:
    """What each pass streams from memory.

    target: without its experts. experts: all of them, of which a row chooses the share `chosen`
    """

    target: int
    experts: int = 0
    chosen: float = 0.0
    draft_step: int = 0
    draft_entry: int = 0  # read once per round: fc; of a block draft all but markov_w2
    most_steps: int | None = None  # of the draft in a round; None: one for each token

    def of_target(self, num_rows: int) -> float:
        """Count what a pass of the target reads: each expert once that a row chooses by chance."""
        return self.target + self.experts * (1 - (1 - self.chosen) ** num_rows)

    def floor_ms(self, K: int, num_requests: int, bandwidth: float) -> float:
        """Give the least milliseconds of a round of K drafts; bandwidth in bytes per second."""
        steps = K if self.most_steps is None else min(K, self.most_steps)
        of_draft = steps * self.draft_step + self.draft_entry if K else 0
        return 1e3 * (self.of_target(num_requests * (K + 1)) + of_draft) / bandwidth


def bytes_of(pair: Pair) -> Bytes:
    """Add up the loaded tensors. A tied or borrowed head counts for the model that reads it."""
    target = pair.target.tensors
    eagle = pair.eagle
    head = target.get(HEAD, target["embed_tokens.weight"])
    experts = sum(x.nbytes for name, x in target.items() if ".mlp.experts." in name)
    config = pair.target.config.experts
    chosen = 0.0 if config is None else config.per_token / config.num
    found = Bytes(sum(_read(target, head).values()) - experts, experts, chosen)
    if eagle is None:
        return found
    draft, read = eagle.config, _read(eagle.tensors, head)
    step = sum(nbytes for name, nbytes in read.items() if draft.is_read_again(name))
    # what makes a context's keys and values in one product is copied (join_context)
    context = draft.context_width * draft.layer.hidden_size * head.element_size()
    once = sum(read.values()) - step + context
    return replace(found, draft_step=step, draft_entry=once, most_steps=draft.most_steps)


def _read(tensors: Mapping[str, Tensor], head: Tensor) -> dict[str, int]:
    """Count the bytes that a pass reads of each tensor. head: read where they have none"""
    read = {HEAD: head, **tensors}
    return {name: tensor.nbytes for name, tensor in read.items() if name not in TABLES}


def _shown(directory: Path) -> str:
    """Write it relative to the working directory, so that figures hide where a clone lies."""
    here = Path.cwd()
    return str(directory.relative_to(here) if directory.is_relative_to(here) else directory)


def card(pair: Pair, bandwidth: float, **settings: object) -> dict[str, object]:
    """Collect every fact that a figure depends on."""
    sizes = bytes_of(pair)
    device = pair.device
    is_gpu = device.type == "cuda"
    cpu = f"CPU, {torch.get_num_threads()} threads"
    draft = None
    if pair.eagle is not None:
        draft = f"{_shown(pair.eagle.report.directory)} ({pair.eagle.config.format})"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else cpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_gpu else None,
        "triton": triton.__version__ if triton is not None else None,
        "dtype": str(pair.target.tensors["embed_tokens.weight"].dtype).removeprefix("torch."),
        "target": _shown(pair.target.report.directory),
        "draft": draft,
        "target_bytes_per_pass": round(sizes.of_target(1)),
        "draft_bytes_per_step": sizes.draft_step,
        "draft_bytes_once": sizes.draft_entry,
        "reading_gb_per_s": bandwidth / 1e9,
        **settings,
    }
