"""The largest sizes that an engine may need, and what no engine can take: refused at the load.

Otherwise each request would be refused in its turn, for what no request can change.
"""

import math
from pathlib import Path

import torch

from specdec.config import MAX_MODEL_LEN, MAX_NUM_SEQS, EngineConfig
from specdec.kernels.head_columns import MOST_BYTES
from specdec.requests.tokenizer import Tokenizer
from specdec.requests.tokenizer_files import vocabulary_name
from specdec.sizes import BLOCK_SIZE, MAX_STOP_IDS, MAX_TREE_REQUESTS, EngineSizes
from specdec.start.speculation import Drafting
from weights.config import BLOCK, Heads, LayerKind, RopeConfig, TargetConfig
from weights.draft.config import DraftConfig
from weights.errors import Problems, shown
from weights.files.header import FLOAT_DTYPES, TensorEntry
from weights.files.reader import Reader

GIB = 1 << 30
FP8_CAPABILITY = 9, 0  # of GPUs whose tensor cores the kernels of FP8 know
FP8_COLUMNS = 16  # rows of codes begin at multiples of 16 bytes
MOST_NAMED = 3  # of the tokens outside the vocabulary
MOST_PREFIXES = 4  # a prefix cache holds at most this many times what all state rows hold together


def largest_sizes(
    config: EngineConfig, drafting: Drafting, target: TargetConfig, eagle: DraftConfig | None
) -> EngineSizes:
    """Give the cache as many blocks as help: what all state rows hold, by `cache_factor`."""
    longest, limit = longest_context(target)
    max_model_len = longest if config.max_model_len is None else config.max_model_len
    if max_model_len > longest:
        raise ValueError(f"max_model_len={max_model_len} exceeds {limit}")
    if eagle is not None and drafting.num_tokens > 0:
        _check_children(drafting, eagle)
    max_num_seqs = _max_num_seqs(config, drafting)
    blocks = max_num_seqs * -(-max_model_len // BLOCK_SIZE)
    return EngineSizes(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_kv_blocks=blocks * cache_factor(config),
        num_speculative_tokens=drafting.num_tokens,
        is_adaptive=drafting.is_adaptive,
        tree=drafting.tree,
        block_rows=0 if eagle is None else eagle.block_rows(drafting.num_tokens),
    )


def cache_factor(config: EngineConfig) -> int:
    """Bound the cache in multiples of what all state rows hold, for what ended requests leave."""
    return MOST_PREFIXES if config.enable_prefix_caching else 1


def check_target(directory: Path, target: TargetConfig, max_model_len: int | None) -> None:
    """Refuse a context or a number of EOS ids that no engine is built for, by CheckpointError."""
    problems = Problems(directory)
    longest, limit = longest_context(target)
    if max_model_len is None and longest > MAX_MODEL_LEN:
        advice = f"give a max_model_len of at most {MAX_MODEL_LEN}"
        problems.add(f"config.json: {limit} is more than an engine takes: {advice}")
    if (count := len(target.eos_token_ids)) > MAX_STOP_IDS:
        what = f"eos_token_id has {count} ids, at most {MAX_STOP_IDS} are possible"
        problems.add(f"config.json and generation_config.json: {what}")
    problems.raise_if_any()


def check_tokenizer(directory: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse tokens whose ids the target has no embedding for, by CheckpointError."""
    outside = tokenizer.tokens_outside(vocab_size)
    if not outside:
        return
    named = ", ".join(f"{text!r:.60} {token}" for token, text in outside[:MOST_NAMED])
    problems = Problems(directory)
    problems.add(
        f"{vocabulary_name(directory)}: ids of {len(outside)} tokens are outside the target's "
        f"vocabulary (0 to {vocab_size - 1}): {shown(named)}{' ...' * (len(outside) > MOST_NAMED)}"
    )
    problems.raise_if_any()


def check_length(sizes: EngineSizes, block: int, memory: int) -> None:
    """Refuse a context that only config.json asks for and `memory` bytes cannot hold.

    Called before the rotary tables are built: those of 10**7 positions take half a minute.
    """
    need = sizes.blocks_per_request * block
    if need > memory:
        raise ValueError(
            f"max_model_len={sizes.max_model_len}, the target's longest: the cache of one request "
            f"needs {need / GIB:.2f} GiB, the device has {memory / GIB:.2f} GiB: give a "
            f"max_model_len of at most {memory // block * BLOCK_SIZE}"
        )


def check_weights(
    reader: Reader, dtype: torch.dtype | None, memory: int, num_devices: int = 1
) -> None:
    """Refuse weights that `memory` bytes of each device cannot hold, before the first is read.

    dtype: that numbers are loaded in, not what has another form; None: as stored
    """
    need = sum(_loaded_bytes(each, dtype) for each in reader.entries.values())
    if need >= memory * num_devices:
        how = "as stored" if dtype is None else f"in {str(dtype).removeprefix('torch.')}"
        has = "the device has" if num_devices == 1 else f"each of {num_devices} devices has"
        raise ValueError(
            f"{reader.directory}: the weights take {need / GIB:.2f} GiB {how}, {has} "
            f"{memory / GIB:.2f} GiB: give a device with more, or a smaller model"
        )


def _loaded_bytes(entry: TensorEntry, dtype: torch.dtype | None) -> int:
    """Count the bytes of a tensor in memory, where scales of blocks are one for each row."""
    is_of_blocks = ".weight_scale" in entry.name and entry.shape[-1:] > (1,)
    if is_of_blocks and len(entry.shape) == 2:
        return math.prod(entry.shape) * BLOCK * torch.float32.itemsize
    if dtype is not None and entry.dtype in FLOAT_DTYPES:
        return math.prod(entry.shape) * dtype.itemsize
    return entry.num_bytes


def check_forms(target: TargetConfig, device: torch.device) -> None:
    """Refuse FP8 on a GPU that cannot multiply it, or widths that kernels cannot read."""
    kinds = [kind for kind in target.kinds if _is_fp8(kind)]
    if device.type != "cuda" or not kinds:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        found, needed = (".".join(map(str, each)) for each in (capability, FP8_CAPABILITY))
        has = f"{torch.cuda.get_device_name(device)} has {found}"
        raise ValueError(f"FP8 weights need a GPU of compute capability {needed}, {has}")
    for kind in kinds:
        width = kind.intermediate_size if kind.experts is None else kind.experts.width
        widths = {"hidden_size": kind.hidden_size, "the width of an MLP": width}
        widths["num_attention_heads * head_dim"] = kind.num_heads * kind.head_dim
        for name, columns in widths.items():
            if columns % FP8_COLUMNS:
                need = f"a multiple of {FP8_COLUMNS} is needed for FP8 on a GPU"
                raise ValueError(f"{name} is {columns}, {need}")


def _is_fp8(kind: LayerKind) -> bool:
    forms = {*kind.forms} if kind.experts is None else {*kind.forms, kind.experts.form}
    return bool(forms & {"fp8 channel", "fp8 block"})


def check_heads(role: str, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse heads that are too wide for attention on a GPU; on a CPU any are fine."""
    most = MOST_BYTES // dtype.itemsize
    if device.type == "cuda" and heads.head_dim > most:
        raise ValueError(
            f"the {role}'s head_dim={heads.head_dim}: attention on a GPU takes at most {most} "
            f"in {dtype}; give device='cpu'"
        )


def longest_context(target: TargetConfig) -> tuple[int, str]:
    """Find the target's longest context, and where it comes from.

    As in vLLM, a scaled rope lengthens it (llama3 does not: its configs have the length raised).
    """
    length = target.max_position_embeddings
    return min(_reach(kind.rope, length) for kind in target.kinds)


def _reach(rope: RopeConfig, length: int) -> tuple[int, str]:
    """Find how far one rope reaches, and where that comes from."""
    bases = {"linear": length, "yarn": rope.original_max_position_embeddings}
    base = bases.get(rope.kind) or 0
    scaled = int(base * rope.factor)
    if scaled <= length:
        return length, f"the target's max_position_embeddings={length}"
    return scaled, f"the target's {scaled} positions ({rope.kind} rope: {base} * {rope.factor:g})"


def _max_num_seqs(config: EngineConfig, drafting: Drafting) -> int:
    """Take the number asked for; fixed draft trees run for fewer requests by default."""
    given = config.max_num_seqs
    if drafting.tree is None or drafting.is_adaptive or given <= MAX_TREE_REQUESTS:
        return given
    if given != MAX_NUM_SEQS:
        limit = f"draft trees run for at most {MAX_TREE_REQUESTS} requests at a time"
        raise ValueError(f"max_num_seqs={given} with top_k={drafting.tree.top_k}: {limit}")
    return MAX_TREE_REQUESTS


def _check_children(drafting: Drafting, eagle: DraftConfig) -> None:
    """Refuse more children of a node than the draft knows tokens: children differ."""
    if drafting.tree is not None and drafting.tree.top_k > eagle.draft_vocab_size:
        tree = f"a draft tree with {drafting.tree.top_k} children of each node"
        known = f"the draft knows {eagle.draft_vocab_size} tokens"
        raise ValueError(f"{tree}, but {known}: give at most as many children")
