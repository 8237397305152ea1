"""What a user chooses, checked once. Values that mean "auto" are resolved elsewhere and never written back."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specdec.arguments import from_mapping

ACCEPTANCE_RULES = ("exact",)
METHODS = ("auto", "eagle", "eagle3")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """An EAGLE draft and how many tokens it proposes per round.

    model: directory, hub id or "demo". method: "auto" reads it from the checkpoint; "eagle" and "eagle3" insist on it.
    acceptance: "exact", the output is that of plain decoding. aux_layers: the target's boundaries that the draft reads
    (b = the stream entering layer b), instead of what its checkpoint says.
    """

    model: str | Path
    num_speculative_tokens: int = 3
    method: str = "auto"
    acceptance: str = "exact"
    aux_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_int("num_speculative_tokens", self.num_speculative_tokens, 0, 32)
        _check_choice("method", self.method, METHODS)
        _check_choice("acceptance", self.acceptance, ACCEPTANCE_RULES)

    @staticmethod
    def of(value: "SpeculativeConfig | Mapping[str, object] | None") -> "SpeculativeConfig | None":
        """Accept the class, a dict of its fields, or None."""
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"speculative_config takes a SpeculativeConfig or a dict, not {type(value).__name__}")
        return from_mapping(SpeculativeConfig, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything else that is fixed when an engine is built. Lengths and budgets are in tokens."""

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    num_kv_blocks: int | None = None

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_int("max_num_seqs", self.max_num_seqs, 1, 4096)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2, 1 << 24)
        if self.num_kv_blocks is not None:
            _check_int("num_kv_blocks", self.num_kv_blocks, 1, 1 << 30)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: give an integer from {low} to {high}")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(allowed)}")
