"""What a user chooses of an engine, checked once. Options left on "auto" are resolved elsewhere.

Each field describes itself: the command line, signatures and docs/options.md are made of that.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphs.modes import CUDAGraphMode
from specdec.arguments import (
    check_choice,
    check_name,
    check_sizes,
    refuse_unknown,
    refusing_unknown,
)
from specdec.described import (
    DRAFTING,
    ENGINES,
    SERVERS,
    TEXT,
    about,
    check_described,
    fixed,
    option,
)
from specdec.from_vllm import ENGINE
from specdec.speculative_config import MOST_DRAFTS, MOST_RANKS

MAX_MODEL_LEN = 1 << 24
GPU_MEMORY_UTILIZATION = 0.9
MAX_PROMPT_SLOWDOWN = 1.8
MAX_NUM_SEQS = 64
MOST_SEQS = 4096
MOST_SLOWDOWN = 1000
DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
# why no command takes an option
AS_IN_VLLM = "it is taken so that a script for vLLM runs, and changes nothing"
# what the graphs of each family may be; the last one is the default
GRAPH_MODES = {
    "target_prefill": ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE"),
    "target_decode": ("NONE", "FULL"),
    "draft_prefill": ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
    "draft_decode": ("NONE", "FULL"),
}


def graph_modes(changed: Mapping[str, str] | None = None) -> dict[str, CUDAGraphMode]:
    """Choose the mode of each graph family: the default, or the one given by name."""
    changed = {} if changed is None else changed
    if not isinstance(changed, Mapping):
        wanted = f"give {{family: mode}}, families are {', '.join(GRAPH_MODES)}"
        raise ValueError(f"cuda_graph_modes={changed!r}: {wanted}")
    refuse_unknown("cuda_graph_modes", changed, GRAPH_MODES)
    names = {family: allowed[-1] for family, allowed in GRAPH_MODES.items()} | dict(changed)
    for family, name in names.items():
        check_choice(f"cuda_graph_modes[{family!r}]", name, GRAPH_MODES[family])
    return {family: CUDAGraphMode[name] for family, name in names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """Says what is captured. Sizes None stand for the defaults."""

    modes: Mapping[str, CUDAGraphMode] = field(default_factory=graph_modes)  # of every family
    request_sizes: tuple[int, ...] | None = None  # of full graphs
    token_sizes: tuple[int, ...] | None = None  # of graphs in pieces
    max_tokens: int = 1024  # of these, by default; at least what all requests verify
    compile_piecewise: bool = False

    @property
    def captures_pieces_by_default(self) -> bool:
        """Say whether steps with prompts have graphs, of sizes that nobody gave."""
        has_pieces = self.modes["target_prefill"].has_piecewise_cudagraphs()
        return has_pieces and self.token_sizes is None


@refusing_unknown(ENGINE)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Holds what is fixed when an engine is built, beside the draft. Lengths are in tokens."""

    COMMANDS = ENGINES

    dtype: str = option(
        "auto",
        "auto, float32, bfloat16 or float16; auto: the checkpoint's on a GPU, float32 on a CPU",
        choices=DTYPES,
    )
    device: object = option(  # or a torch.device
        "auto", "auto, cpu, cuda or cuda:N; auto: a GPU if there is one"
    )
    max_model_len: int | None = option(
        None, "longest context in tokens", unset="the target's", bounds=(2, MAX_MODEL_LEN)
    )
    max_num_seqs: int = option(
        MAX_NUM_SEQS,
        "most samples at a time, others wait; with draft trees at most 32",
        bounds=(1, MOST_SEQS),
        planned_by=(*TEXT, "verify"),
    )
    max_num_batched_tokens: int = option(
        8192, "tokens of prompts in a step", bounds=(1, 1 << 20), commands=SERVERS
    )
    max_prompt_slowdown: float = option(
        MAX_PROMPT_SLOWDOWN,
        "how much prompts may slow a step of running requests (GPU only)",
        text="on a GPU, the longest step with prompt tokens, in steps without: how long running "
        "requests may wait; at least 64 tokens of the first prompt run in any step, as many as "
        "arrive on average, and a sixteenth of those that wait, of each prompt 512 at most",
        bounds=(1, MOST_SLOWDOWN),
        commands=SERVERS,
    )
    gpu_memory_utilization: float | None = option(
        None,
        "share of a GPU's memory to use in all, unless the number of blocks is given",
        unset=str(GPU_MEMORY_UTILIZATION),
        bounds=(0.01, 1.0),
    )
    num_kv_blocks: int | None = option(
        None,
        "size of the cache in blocks of 64 tokens",
        unset="what the memory holds",
        bounds=(1, 1 << 30),
        commands=SERVERS,
    )
    enforce_eager: bool = option(False, "capture no CUDA graphs")
    cuda_graph_sizes: Sequence[int] | None = option(
        None, "request counts to capture rounds for, as in 1,2,4", unset="what pays"
    )
    cuda_graph_token_sizes: Sequence[int] | None = option(
        None, "row counts to capture steps with prompts for, as in 256,1024", unset="what pays"
    )
    compile_piecewise: bool = option(
        False, "split steps with prompts by torch.compile, not by breakable capture"
    )
    cuda_graph_modes: Mapping[str, str] | None = option(
        None,
        "what each graph family captures: target_decode=NONE,draft_decode=NONE",
        text="what each graph family captures, {family: mode}: "
        + "; ".join(f"{family}: {' or '.join(modes)}" for family, modes in GRAPH_MODES.items()),
        unset="the last mode of each",
        metavar="FAMILY=MODE,...",
    )
    enable_prefix_caching: bool = option(
        True,
        "compute every prompt anew, even where another began the same way",
        text="keep the cache of ended requests for prompts that begin with the same tokens",
        flag="--no-prefix-caching",
        commands=DRAFTING,
    )
    async_scheduling: bool | None = option(
        None,
        "launch a step before the results of the one before are read",
        unset="on a GPU only",
        flag="--async-scheduling/--no-async-scheduling",
    )
    seed: int | None = option(
        None,
        "draws the seeds of requests without one, in their order",
        unset="random",
        bounds=(0, (1 << 64) - 1),
        commands=("verify", *SERVERS),
    )
    use_tqdm_on_load: bool = option(
        True,
        "show progress on a terminal while weights are read and kernels are compiled",
        python_only="a command shows progress on terminals only",
    )
    tokenizer: str | Path | None = field(
        default=None, metadata=about("directory or hub id of the tokenizer", unset="the target's")
    )
    revision: str | None = option(None, "branch, tag or commit of the target's hub id")
    tokenizer_revision: str | None = option(None, "branch, tag or commit of the tokenizer's hub id")
    hf_token: str | bool | None = option(
        None,
        "token for downloads from the hub; True: the saved one",
        python_only="a command line is seen by others: set HF_TOKEN",
    )
    download_dir: str | Path | None = field(
        default=None, metadata=about("directory for downloads", unset="the hub's cache")
    )
    trust_remote_code: bool = fixed(False, "no code of a checkpoint ever runs")
    tensor_parallel_size: int = option(
        1,
        "GPUs that hold and run one model together, each a part of it",
        text="GPUs of this host, the first ones that are visible, that hold and run one model "
        "together, each a part of its heads, columns, experts and vocabulary; on a CPU, processes. "
        "Tokens are those of one GPU, for the numbers in [limits.md](limits.md)",
        bounds=(1, MOST_RANKS),
        short="-tp",
    )
    quantization: None = fixed(
        None,
        "files say it: give a checkpoint in float32, bfloat16, float16, FP8 or gpt-oss's MXFP4",
    )
    enable_chunked_prefill: bool = fixed(
        True, "parts of prompts ride in steps: raise max_prompt_slowdown and max_num_batched_tokens"
    )
    disable_log_stats: bool = option(True, "no effect", python_only=AS_IN_VLLM)
    swap_space: float = option(4, "no effect", bounds=(0, 1 << 30), python_only=AS_IN_VLLM)
    tokenizer_mode: str = fixed("auto", "the checkpoint says which tokenizer it has")
    skip_tokenizer_init: bool = fixed(False, "give token ids and detokenize=False instead")
    kv_cache_dtype: str = fixed("auto", "the cache has the dtype of the model")
    load_format: str = fixed(
        "auto", "weights are read from safetensors (`specdec convert` writes them)"
    )
    task: str = fixed("generate", "specdec generates text", "auto")
    distributed_executor_backend: str | None = fixed(
        None, "each GPU has a process of its own; specdec.fleet runs engines on Ray", "mp"
    )
    block_size: int | None = fixed(64, "attention is written for blocks of 64 tokens", None)

    def __post_init__(self) -> None:
        check_described(self)
        # a torch.device is known by its name, since the host side imports no torch
        is_named = isinstance(self.device, str) and DEVICES.fullmatch(self.device)
        if not is_named and type(self.device).__name__ != "device":
            raise ValueError(f"device={self.device!r}: give auto, cpu, cuda or cuda:N")
        check_sizes("cuda_graph_sizes", self.cuda_graph_sizes, self.max_num_seqs)
        # the engine knows its own number of drafts, and refuses what is still too many
        limit = self.max_num_batched_tokens + self.max_num_seqs * (MOST_DRAFTS + 1)
        check_sizes("cuda_graph_token_sizes", self.cuda_graph_token_sizes, limit)
        graph_modes(self.cuda_graph_modes)
        if self.enforce_eager:
            self.refuse_graph_options("enforce_eager=True captures nothing")
        if self.tensor_parallel_size > 1 and self.compile_piecewise:
            given = f"with tensor_parallel_size={self.tensor_parallel_size}"
            why = "torch.compile does not see transfers between GPUs: leave it out"
            raise ValueError(f"compile_piecewise=True {given}: {why}")
        check_name("revision", self.revision)
        check_name("tokenizer_revision", self.tokenizer_revision)
        if not isinstance(self.hf_token, str | bool | None):
            raise ValueError("hf_token: give a string, True for the saved one, or None")
        for name in ("tokenizer", "download_dir"):
            value = getattr(self, name)
            if not isinstance(value, str | Path | None) or value == "":
                raise ValueError(f"{name}={value!r}: give a directory, or None")

    @property
    def graphs(self) -> GraphConfig:
        requests, tokens = self.cuda_graph_sizes, self.cuda_graph_token_sizes
        return GraphConfig(
            modes=graph_modes(self.cuda_graph_modes),
            request_sizes=None if requests is None else tuple(requests),
            token_sizes=None if tokens is None else tuple(tokens),
            compile_piecewise=self.compile_piecewise,
        )

    @property
    def utilization(self) -> float:
        """Return the share of a GPU's memory to use."""
        given = self.gpu_memory_utilization
        return GPU_MEMORY_UTILIZATION if given is None else given

    def refuse_graph_options(self, reason: str) -> None:
        """Refuse graph options where, for this reason, no graph is captured."""
        names = ("cuda_graph_sizes", "cuda_graph_token_sizes", "cuda_graph_modes")
        self._refuse((*names, "compile_piecewise"), reason)

    def refuse_unused_graph_options(self, has_draft: bool) -> None:
        """Refuse a draft's modes without a draft, and sizes that no family captures."""
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
        of_rounds = (mode for name, mode in modes.items() if name != "target_prefill")
        if not any(mode.decode_mode() is CUDAGraphMode.FULL for mode in of_rounds):
            self._refuse(("cuda_graph_sizes",), "cuda_graph_modes leave no full graphs of rounds")

    def _refuse(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ValueError(f"{name}={value!r}, but {reason}: leave it out")
