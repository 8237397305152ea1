"""What a user chooses, checked once. Options left on "auto" are resolved elsewhere, not here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphs.modes import CUDAGraphMode
from specdec.arguments import (
    check_choice,
    check_fraction,
    check_int,
    check_name,
    check_sizes,
    from_mapping,
    is_integer,
    is_list,
    plain,
    refuse_unknown,
    refusing_unknown,
)
from specdec.from_vllm import ENGINE, SPECULATION

AUTO = "auto"
ACCEPTANCE_RULES = ("exact", "rejection", "block")
METHODS = ("auto", "eagle", "eagle3")
OTHER_METHODS = (  # of vLLM
    *("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "draft_model", "mtp", "dflash"),
    *("deepseek_mtp", "mimo_mtp", "ernie_mtp", "qwen3_next_mtp", "longcat_flash_mtp", "custom"),
)
MAX_MODEL_LEN = 1 << 24
GPU_MEMORY_UTILIZATION = 0.9
MAX_PROMPT_SLOWDOWN = 1.8
MAX_NUM_SEQS = 64
MOST_SLOWDOWN = 1000
MOST_DRAFTS = 32
MOST_NODES = 63  # of a tree, which with its root fill a tile of rows
MOST_CHILDREN = 16
DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
SWITCHES = (
    "enforce_eager",
    "enable_prefix_caching",
    "use_tqdm_on_load",
    "compile_piecewise",
    "disable_log_stats",
)
# options of vLLM: the values that describe specdec, and why there are no others
FIXED: dict[str, tuple[tuple[object, ...], str]] = {
    "tokenizer_mode": (("auto",), "the checkpoint says which tokenizer it has"),
    "skip_tokenizer_init": ((False,), "give token ids and detokenize=False instead"),
    "kv_cache_dtype": (("auto",), "the cache has the dtype of the model"),
    "load_format": (("auto",), "weights are read from safetensors (`specdec convert` writes them)"),
    "task": (("generate", "auto"), "specdec generates text"),
    "block_size": ((64, None), "attention is written for blocks of 64 tokens"),
    "trust_remote_code": ((False,), "no code of a checkpoint ever runs"),
    "tensor_parallel_size": ((1,), "a model runs on one GPU, which device='cuda:N' chooses"),
    "draft_tensor_parallel_size": ((1,), "a model runs on one GPU, which device='cuda:N' chooses"),
    "distributed_executor_backend": (
        (None, "mp"),
        "a model runs on one GPU; specdec.fleet runs engines on a cluster of Ray",
    ),
    "quantization": ((None,), "weights are float32, bfloat16 or float16: give such a checkpoint"),
    "enable_chunked_prefill": (
        (True,),
        "parts of prompts ride in steps: raise max_prompt_slowdown and max_num_batched_tokens",
    ),
}
INTEGERS = (  # options of EngineConfig, from and to
    ("max_num_seqs", 1, 4096),
    ("max_num_batched_tokens", 1, 1 << 20),
    ("max_model_len", 2, MAX_MODEL_LEN),
    ("num_kv_blocks", 1, 1 << 30),
    ("seed", 0, (1 << 64) - 1),
)
OPTIONAL = ("max_model_len", "num_kv_blocks", "seed")  # may be None
# what the graphs of each family may be; the last one is the default
GRAPH_MODES = {
    "target_prefill": ("NONE", "PIECEWISE"),
    "target_decode": ("NONE", "FULL"),
    "draft_prefill": ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
    "draft_decode": ("NONE", "FULL"),
}


@refusing_unknown(SPECULATION)
@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """An EAGLE draft and how many tokens it proposes per round.

    num_speculative_tokens: the most for each request; "auto": 8. adaptive: draft as many as pay,
    and verify the most probable drafts of all requests; False: num_speculative_tokens for each;
    None: True, but for a tree. To be adaptive needs graphs on a GPU and acceptance "exact";
    elsewhere the number is fixed, "auto" is 3, and the log says why. Tokens depend on none of it.
    top_k: 1: chains. None: chains too, but where "auto" adapts, up to 8 requests at a time get
    trees of 8 levels, top_k 4 and 15 nodes in the rounds in which these pay more. Above 1 a tree is
    drafted in every round, of num_speculative_tokens levels: the top_k best nodes of a
    level get top_k children each, and the num_draft_tokens most probable nodes of all levels are
    verified. Such trees need acceptance "exact", a fixed number of levels and a max_num_seqs of at
    most 32, which is then its default. In a chain num_draft_tokens is num_speculative_tokens, which
    is its default for a tree too.
    draft_confidence_threshold: from 0 to below 1: draft another level only while the best paths of
    the last one have at least this probability by the draft, on average over the requests. 0: draft
    all levels; None: as it pays where the number of drafts adapts, for up to 8 requests; elsewhere
    0. Needs acceptance "exact".
    model: directory, hub id or "demo". method: "auto" reads it from the checkpoint; "eagle" and
    "eagle3" require it. acceptance: "exact", the output is that of plain decoding, sampled or
    greedy; "rejection" and "block" keep the distribution of sampled tokens but not the tokens, and
    accept more drafts (greedy output stays exact). aux_layers: the target's boundaries that the
    draft reads (b = the stream entering layer b), instead of those its checkpoint names.
    revision: of a hub id. draft_tensor_parallel_size: as in vLLM, always 1.
    """

    model: str | Path
    num_speculative_tokens: int | str = AUTO
    method: str = "auto"
    acceptance: str = "exact"
    aux_layers: Sequence[int] | None = None
    revision: str | None = None
    draft_tensor_parallel_size: int = 1
    adaptive: bool | None = None
    top_k: int | None = None
    num_draft_tokens: int | None = None
    draft_confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        _make_plain(self)
        _refuse_other_drafts(self.method)
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ValueError(
                f"model={self.model!r}: give a directory, a hub id owner/name, or demo"
            )
        if isinstance(self.num_speculative_tokens, str):
            if self.num_speculative_tokens != AUTO:
                allowed = f"give {AUTO!r}, or an integer from 0 to {MOST_DRAFTS}"
                raise ValueError(
                    f"num_speculative_tokens={self.num_speculative_tokens!r}: {allowed}"
                )
        else:
            check_int("num_speculative_tokens", self.num_speculative_tokens, 0, MOST_DRAFTS)
        check_choice("adaptive", self.adaptive, (None, False, True))
        check_choice("acceptance", self.acceptance, ACCEPTANCE_RULES)
        if self.acceptance != "exact" and self.num_speculative_tokens == 0:
            given = f"acceptance={self.acceptance!r} with num_speculative_tokens=0"
            raise ValueError(f"{given}: there are no drafts to accept: leave one of them out")
        _check_layers(self.aux_layers)
        check_name("revision", self.revision)
        if self.top_k is not None:
            check_int("top_k", self.top_k, 1, MOST_CHILDREN)
        if self.num_draft_tokens is not None:
            check_int("num_draft_tokens", self.num_draft_tokens, 0, MOST_NODES)
        self._check_threshold()
        if self.has_fixed_tree:
            self._check_tree()
        else:
            self._check_chain()
        _check_fixed(self)

    @property
    def has_fixed_tree(self) -> bool:
        """Whether a tree is drafted in every round."""
        return self.top_k is not None and self.top_k > 1

    def _check_threshold(self) -> None:
        threshold = self.draft_confidence_threshold
        if threshold is None:
            return
        given = f"draft_confidence_threshold={threshold!r}"
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not is_number or not 0 <= threshold < 1:
            raise ValueError(f"{given}: give a probability from 0 to below 1, or None")
        if threshold > 0 and self.acceptance != "exact":
            rule = f"acceptance={self.acceptance!r}"
            raise ValueError(f"{given} with {rule}: drafts stop with 'exact' only: leave one out")
        levels = self.num_speculative_tokens
        if threshold > 0 and isinstance(levels, int) and levels < 2:
            given += f" with num_speculative_tokens={levels}"
            raise ValueError(
                f"{given}: a first draft is always made: give 2 or more, or leave it out"
            )

    def _check_chain(self) -> None:
        count = self.num_draft_tokens
        if count is not None and count != self.num_speculative_tokens:
            given = f"num_draft_tokens={count} without a top_k above 1"
            levels = f"num_speculative_tokens={self.num_speculative_tokens}"
            raise ValueError(f"{given}: a chain has {levels} drafts: leave it out, or raise top_k")

    def _check_tree(self) -> None:
        k, levels = self.top_k or 1, self.num_speculative_tokens
        if self.acceptance != "exact":
            given = f"top_k={k} with acceptance={self.acceptance!r}"
            raise ValueError(f"{given}: trees are verified by 'exact' only: leave one of them out")
        if self.adaptive:
            given = f"top_k={k} with adaptive=True"
            raise ValueError(f"{given}: the levels of a tree are fixed: give adaptive=False")
        if not isinstance(levels, int) or levels == 0:
            given = f"num_speculative_tokens={levels!r} with top_k={k}"
            raise ValueError(f"{given}: a tree has fixed levels: give 1 to {MOST_DRAFTS} of them")
        most = min(k + k * k * (levels - 1), MOST_NODES)
        count = levels if self.num_draft_tokens is None else self.num_draft_tokens
        if not 1 <= count <= most:
            tree = f"of a tree of num_speculative_tokens={levels} levels with top_k={k}"
            raise ValueError(f"num_draft_tokens={count}: {tree} 1 to {most} nodes can be verified")

    @staticmethod
    def of(value: "SpeculativeConfig | Mapping[str, object] | None") -> "SpeculativeConfig | None":
        """Accept the class, a dict of its fields, or None."""
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"speculative_config={value!r}: give a SpeculativeConfig or a dict of its fields"
            )
        if not value.keys() & SPECULATION.keys():  # before a model is missed
            _refuse_other_drafts(value.get("method", AUTO))
        return from_mapping(SpeculativeConfig, value, SPECULATION)


def graph_modes(changed: Mapping[str, str] | None = None) -> dict[str, CUDAGraphMode]:
    """The mode of each graph family: the default, or the one given by name."""
    changed = {} if changed is None else changed
    if not isinstance(changed, Mapping):
        raise ValueError(
            f"cuda_graph_modes={changed!r}: give {{family: mode}}, families are "
            f"{', '.join(GRAPH_MODES)}"
        )
    refuse_unknown("cuda_graph_modes", changed, GRAPH_MODES)
    names = {family: allowed[-1] for family, allowed in GRAPH_MODES.items()} | dict(changed)
    for family, name in names.items():
        check_choice(f"cuda_graph_modes[{family!r}]", name, GRAPH_MODES[family])
    return {family: CUDAGraphMode[name] for family, name in names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """What is captured. Sizes None: the defaults."""

    modes: Mapping[str, CUDAGraphMode] = field(default_factory=graph_modes)  # of every family
    request_sizes: tuple[int, ...] | None = None  # of full graphs
    token_sizes: tuple[int, ...] | None = None  # of graphs in pieces
    max_tokens: int = 1024  # of these, by default; at least what all requests verify
    compile_piecewise: bool = False

    @property
    def captures_pieces_by_default(self) -> bool:
        """Whether steps with prompts have graphs, of sizes that nobody gave."""
        has_pieces = self.modes["target_prefill"] is CUDAGraphMode.PIECEWISE
        return has_pieces and self.token_sizes is None


@refusing_unknown(ENGINE)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything else that is fixed when an engine is built. Lengths and budgets are in tokens.

    max_num_batched_tokens: of prompts in a step. max_prompt_slowdown: on a GPU, where the start
    measures what steps cost, prompts that ride in a step make it take at most this many times as
    long as a step in which requests draft, which is how long running requests may wait; 64 tokens
    of the first prompt ride in any case, as many as arrive on average, and a sixteenth of those
    that wait, of each prompt 512 at most. A CPU has no such limit.
    gpu_memory_utilization: the share of a GPU's memory to use in all, 0.9 by default; num_kv_blocks
    overrides it, and is the only one of the two on a CPU. enforce_eager: capture no graphs.
    cuda_graph_sizes: request counts to capture rounds for. cuda_graph_token_sizes: row counts to
    capture steps with prompts for. compile_piecewise: split these by torch.compile, not by
    breakable capture. cuda_graph_modes: {family: mode} to change some of GRAPH_MODES.
    seed: draws the seeds of requests without one, in their order; None: a random one.
    enable_prefix_caching: keep the cache of ended requests for prompts that begin with the same
    tokens. async_scheduling: launch a step before the results of the one before are read; None: on
    a GPU only. use_tqdm_on_load: show progress on a terminal while weights are read and kernels are
    compiled.

    tokenizer: directory or hub id, if not the model's. revision, tokenizer_revision: of hub ids.
    hf_token, download_dir: for downloads. The rest is taken so that a script for vLLM runs:
    disable_log_stats and swap_space change nothing, the others are as FIXED says.
    """

    dtype: str = "auto"
    device: object = "auto"  # a string or a torch.device
    max_model_len: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = 8192
    max_prompt_slowdown: float = MAX_PROMPT_SLOWDOWN
    gpu_memory_utilization: float | None = None
    num_kv_blocks: int | None = None
    enforce_eager: bool = False
    cuda_graph_sizes: Sequence[int] | None = None
    cuda_graph_token_sizes: Sequence[int] | None = None
    compile_piecewise: bool = False
    cuda_graph_modes: Mapping[str, str] | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    seed: int | None = None
    use_tqdm_on_load: bool = True
    tokenizer: str | Path | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    hf_token: str | bool | None = None
    download_dir: str | Path | None = None
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    quantization: None = None
    enable_chunked_prefill: bool = True
    disable_log_stats: bool = True
    swap_space: float = 4
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    task: str = "generate"
    distributed_executor_backend: str | None = None
    block_size: int | None = 64

    def __post_init__(self) -> None:
        _make_plain(self)
        check_choice("dtype", self.dtype, DTYPES)
        # a torch.device is known by its name, since the host side imports no torch
        is_named = isinstance(self.device, str) and DEVICES.fullmatch(self.device)
        if not is_named and type(self.device).__name__ != "device":
            raise ValueError(f"device={self.device!r}: give auto, cpu, cuda or cuda:N")
        for name, low, high in INTEGERS:
            if name not in OPTIONAL or getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, high)
        if self.gpu_memory_utilization is not None:
            check_fraction("gpu_memory_utilization", self.gpu_memory_utilization)
        slowdown = self.max_prompt_slowdown
        if not isinstance(slowdown, int | float) or isinstance(slowdown, bool):
            raise ValueError(f"max_prompt_slowdown={slowdown!r}: give a number")
        if not 1 <= slowdown <= MOST_SLOWDOWN:
            limits = f"from 1 to {MOST_SLOWDOWN}"
            raise ValueError(f"max_prompt_slowdown={slowdown!r}: give a number {limits}")
        for name in SWITCHES:
            check_choice(name, getattr(self, name), (False, True))
        check_choice("async_scheduling", self.async_scheduling, (None, False, True))
        check_sizes("cuda_graph_sizes", self.cuda_graph_sizes, self.max_num_seqs)
        # the engine knows its own number of drafts, and refuses what is still too many
        limit = self.max_num_batched_tokens + self.max_num_seqs * (MOST_DRAFTS + 1)
        check_sizes("cuda_graph_token_sizes", self.cuda_graph_token_sizes, limit)
        graph_modes(self.cuda_graph_modes)
        self._check_sources()
        _check_fixed(self)
        if self.enforce_eager:
            self.refuse_graph_options("enforce_eager=True captures nothing")

    def _check_sources(self) -> None:
        for name in ("revision", "tokenizer_revision"):
            check_name(name, getattr(self, name))
        if not isinstance(self.hf_token, str | bool | None):
            raise ValueError("hf_token: give a string, True for the saved one, or None")
        for name in ("tokenizer", "download_dir"):
            value = getattr(self, name)
            if not isinstance(value, str | Path | None) or value == "":
                raise ValueError(f"{name}={value!r}: give a directory, or None")
        space = self.swap_space
        if not isinstance(space, int | float) or isinstance(space, bool) or not space >= 0:
            raise ValueError(f"swap_space={space!r}: give a number of GiB (nothing is swapped)")

    @property
    def graphs(self) -> GraphConfig:
        """The options about graphs, resolved."""
        requests = self.cuda_graph_sizes
        tokens = self.cuda_graph_token_sizes
        return GraphConfig(
            modes=graph_modes(self.cuda_graph_modes),
            request_sizes=None if requests is None else tuple(requests),
            token_sizes=None if tokens is None else tuple(tokens),
            compile_piecewise=self.compile_piecewise,
        )

    @property
    def utilization(self) -> float:
        """The share of a GPU's memory to use."""
        given = self.gpu_memory_utilization
        return GPU_MEMORY_UTILIZATION if given is None else given

    def refuse_graph_options(self, reason: str) -> None:
        """ValueError if a graph option is given although, for this reason, none is captured."""
        sizes = ("cuda_graph_sizes", "cuda_graph_token_sizes")
        self._refuse((*sizes, "cuda_graph_modes", "compile_piecewise"), reason)

    def refuse_unused_graph_options(self, has_draft: bool) -> None:
        """ValueError for a draft's modes without a draft, and for sizes that no family captures."""
        modes = self.graphs.modes
        if not has_draft:
            modes = {name: mode for name, mode in modes.items() if not name.startswith("draft")}
        for name, mode in (self.cuda_graph_modes or {}).items():
            if name not in modes:
                raise ValueError(
                    f"cuda_graph_modes[{name!r}]={mode!r}, but nothing is drafted (no "
                    "speculative_config, or num_speculative_tokens=0): leave it out"
                )
        if not any(mode.has_piecewise_cudagraphs() for mode in modes.values()):
            names = ("cuda_graph_token_sizes", "compile_piecewise")
            self._refuse(names, "cuda_graph_modes leave no graphs in pieces")
        if not any(mode.decode_mode() is CUDAGraphMode.FULL for mode in modes.values()):
            self._refuse(("cuda_graph_sizes",), "cuda_graph_modes leave no full graphs")

    def _refuse(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ValueError(f"{name}={value!r}, but {reason}: leave it out")


def _make_plain(config: object) -> None:
    """Numbers of numpy become Python's own."""
    for name in config.__dataclass_fields__:  # type: ignore[attr-defined]
        object.__setattr__(config, name, plain(getattr(config, name)))


def _check_fixed(config: object) -> None:
    for name, (allowed, reason) in FIXED.items():
        value = getattr(config, name, allowed[0])
        # with its type, since 1 == True, and since an array compares item by item
        if not any(
            value is each or (type(value) is type(each) and value == each) for each in allowed
        ):
            values = " or ".join(map(repr, allowed))
            verb = "is" if len(allowed) == 1 else "are"
            raise ValueError(f"{name}={value!r}: only {values} {verb} possible, since {reason}")


def _refuse_other_drafts(method: object) -> None:
    if isinstance(method, str) and method in OTHER_METHODS:
        advice = "drafts come from EAGLE heads only: give one as model=, and leave method out"
        raise ValueError(f"method={method!r}: {advice}")
    check_choice("method", method, METHODS)


def _check_layers(values: Sequence[int] | None) -> None:
    if values is None:
        return
    if not is_list(values) or not all(map(is_integer, values)) or not values:
        raise ValueError(f"aux_layers={values!r}: give a list of the target's boundaries, or None")
