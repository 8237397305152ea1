"""On how many ranks a model can be cut, by its config alone: before any weights are read."""

from collections.abc import Iterator
from typing import NamedTuple

from weights.config import BLOCK, LayerKind, TargetConfig
from weights.draft.config import DraftConfig
from weights.shard import num_vocabulary_blocks

KEEP_WHOLE = "draft_tensor_parallel_size=1 keeps the draft whole on every rank"


def check_target_ranks(config: TargetConfig, size: int) -> None:
    """Refuse a number of ranks that does not fit the target: ValueError, in one line."""
    reasons = dict.fromkeys(_reasons(config, size))  # layers of two kinds share some
    if reasons:
        possible = ", ".join(map(str, possible_ranks(config)))
        raise ValueError(f"tensor_parallel_size={size}: {'; '.join(reasons)}; possible: {possible}")


def check_draft_ranks(config: DraftConfig, size: int) -> None:
    """Refuse to cut a draft that does not fit: ValueError, in one line."""
    if config.is_parallel and size > 1:
        given = f"draft_tensor_parallel_size={size}"
        raise ValueError(f"{given}: a {config.method} draft is not cut; {KEEP_WHOLE}")
    reasons = list(_reasons(config, size))
    if reasons:
        cut = f"draft_tensor_parallel_size={size}: the draft's {'; its '.join(reasons)}"
        raise ValueError(f"{cut}; {KEEP_WHOLE}")


def possible_ranks(config: TargetConfig) -> list[int]:
    """List the numbers of ranks that fit, 1 among them."""
    sizes = range(1, config.heads.num_heads + 1)
    return [size for size in sizes if not any(_reasons(config, size))]


def _reasons(config: TargetConfig | DraftConfig, size: int) -> Iterator[str]:
    """Say what does not fit, under the keys of config.json."""
    tables = {"vocab_size": config.vocab_size}
    kinds: tuple[LayerKind, ...]
    if isinstance(config, TargetConfig):
        kinds = config.kinds
    else:
        kinds = (config.layer,)
        tables["draft_vocab_size"] = config.draft_vocab_size
    for kind in kinds:
        yield from map(str, misfits_of_layer(kind, size))
    for key, ids in tables.items():
        blocks = num_vocabulary_blocks(ids)
        if size > blocks:
            yield f"{key} is {ids}, in {blocks} blocks, fewer than {size}"


class Misfit(NamedTuple):
    """What cannot be dealt out to so many ranks: a key of config.json, and why."""

    key: str
    what: str  # in a word
    number: int
    why: str

    def __str__(self) -> str:
        return f"{self.key} is {self.number}, {self.why}"


def misfits_of_layer(kind: LayerKind, size: int) -> Iterator[Misfit]:
    """List what does not fit, the key of a layer's config by key."""
    multiple = f"no multiple of {size}"
    if kind.num_heads % size:
        yield Misfit("num_attention_heads", "heads", kind.num_heads, multiple)
    fewer, more = sorted((kind.num_kv_heads, size))
    if more % fewer:  # fewer heads than ranks are copied
        why = f"no multiple or divisor of {size}"
        yield Misfit("num_key_value_heads", "kv heads", kind.num_kv_heads, why)
    if kind.experts is not None and kind.experts.num % size:
        yield Misfit("num_experts", "experts", kind.experts.num, multiple)
    if kind.intermediate_size % size:
        yield Misfit("intermediate_size", "columns of down_proj", kind.intermediate_size, multiple)
    elif size > 1:
        yield from _cut_blocks(kind, size)


def _cut_blocks(kind: LayerKind, size: int) -> Iterator[Misfit]:
    """List columns of FP8 weights whose ranks would share 128, of which each sum is made apart."""
    why = f"in FP8 no multiple of {size} * {BLOCK}"
    columns = kind.num_heads * kind.head_dim
    if kind.forms.o_proj != "plain" and columns % (size * BLOCK):
        yield Misfit("num_attention_heads * head_dim", "columns of o_proj", columns, why)
    columns = kind.intermediate_size
    if kind.forms.down_proj != "plain" and columns % (size * BLOCK):
        yield Misfit("intermediate_size", "columns of down_proj", columns, why)
