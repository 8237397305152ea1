"""The keyword arguments of LLM and AsyncLLM, for type checkers and editors.

Names, types and defaults are those of EngineConfig, which checks the values. EngineOptions is
generated from it, since type checkers read the text.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypedDict, TypeVar, cast

from specdec.arguments import refusing_unknown
from specdec.config import EngineConfig
from specdec.from_vllm import ENGINE
from specdec.speculative_config import SpeculativeConfig

Function = TypeVar("Function", bound=Callable[..., None])


class EngineOptions(TypedDict, total=False):
    """Types the fields of EngineConfig, which describe the options."""

    # generated: python -m scripts.write_options
    dtype: str
    device: object
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prompt_slowdown: float
    gpu_memory_utilization: float | None
    num_kv_blocks: int | None
    enforce_eager: bool
    cuda_graph_sizes: Sequence[int] | None
    cuda_graph_token_sizes: Sequence[int] | None
    compile_piecewise: bool
    cuda_graph_modes: Mapping[str, str] | None
    enable_prefix_caching: bool
    async_scheduling: bool | None
    seed: int | None
    use_tqdm_on_load: bool
    tokenizer: str | Path | None
    revision: str | None
    tokenizer_revision: str | None
    hf_token: str | bool | None
    download_dir: str | Path | None
    trust_remote_code: bool
    tensor_parallel_size: int
    quantization: None
    enable_chunked_prefill: bool
    disable_log_stats: bool
    swap_space: float
    tokenizer_mode: str
    skip_tokenizer_init: bool
    kv_cache_dtype: str
    load_format: str
    task: str
    distributed_executor_backend: str | None
    block_size: int | None
    # end of generated


def with_signature(create: Function) -> Function:
    """Decorate a constructor that takes **options: help() and editors see each with its default."""
    own = inspect.signature(create)
    named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = inspect.signature(EngineConfig).parameters.values()
    signature = own.replace(parameters=[*named, *options])
    create.__signature__ = signature  # type: ignore[attr-defined]
    return create


@refusing_unknown(ENGINE)
@dataclass(frozen=True, slots=True)
class AsyncEngineArgs(EngineConfig):
    """Holds the arguments of AsyncLLM, checked, for AsyncLLM.from_engine_args as in vLLM."""

    model: str | Path
    speculative_config: SpeculativeConfig | Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ValueError(
                f"model={self.model!r}: give a directory, a hub id, demo or demo-experts"
            )
        speculation = SpeculativeConfig.of(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculation)

    @property
    def options(self) -> EngineOptions:
        """Return the arguments of the engine, without model and speculative_config."""
        values = {each.name: getattr(self, each.name) for each in fields(EngineConfig)}
        return cast(EngineOptions, values)
