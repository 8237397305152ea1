"""What drafts of every kind have or lack: layers, ids, a fitting embedding and head."""

import re

from weights.draft.config import DraftConfig
from weights.draft.sources import Sources
from weights.shapes import file_names

LAYERS = "num_hidden_layers"
LAYER = re.compile(r"layers\.([0-9]{1,9})\.")


def num_layers_of(sources: Sources, key: str = LAYERS) -> int:
    """Count the layers by tensor names and config.json, whichever says more."""
    seen = max((int(found[1]) for found in map(LAYER.match, sources.held) if found), default=0) + 1
    written = sources.fields.get(int, key, 1)
    source = "tensor names" if seen >= written else sources.fields.source(key)
    num_layers = max(written, seen)
    sources.log.add("num_layers", num_layers, source)
    if num_layers > len(sources.held):
        where = f"{file_names(sources.held)}: {source}" if seen >= written else source
        line = f"{where}: {num_layers} layers, but only {len(sources.held)} tensors"
        sources.fields.problems.add(line, fatal=True)
    return num_layers


def target_hidden_size(sources: Sources, hidden_size: int) -> int:
    """Find the target's hidden size. hidden_size: the draft's own"""
    target = sources.target
    written = sources.fields.find(int, "target_hidden_size")
    source = sources.fields.source("target_hidden_size")
    if written is None:
        written = hidden_size
        source = f"the draft's hidden_size (config.json and {file_names(sources.held)})"
    actual = written if target is None else target.hidden_size
    sources.log.add("target_hidden_size", actual, source if target is None else "the target")
    if written != actual:
        line = f"a draft for another hidden size: {source} says {written}, the target's is {actual}"
        sources.fields.problems.add(line)
    return actual


def vocabulary(sources: Sources) -> tuple[int, int]:
    """Find V, the target's, and W, the draft's."""
    fields = sources.fields
    sizes = sources.dims({"embed_tokens.weight": 0, "t2d": 0})
    if sources.target is None:
        V = sources.number("vocab_size", sizes, default=0)
    else:
        V = sources.target.vocab_size
        sources.log.add("vocab_size", V, "the target")
    written = {fields.source("vocab_size"): fields.find(int, "vocab_size")}
    stated = {sources.held[name].where: size for name, size in sizes.items()}
    for source, size in (written | stated).items():
        if size is not None and size != V:
            line = f"{source} says {size}, the target has {V} tokens"
            fields.problems.add(f"a draft for another vocabulary: {line}")
    heads = sources.dims({"lm_head.weight": 0, "d2t": 0})
    W = sources.number("draft_vocab_size", heads, default=V)
    if W > V > 0:
        where = sources.where("draft_vocab_size", *heads)
        line = f"the draft's vocabulary of {W} tokens is larger than the target's {V}"
        fields.problems.add(f"{where}: {line}")
    return V, W


def mask_token(sources: Sources, vocab_size: int, *keys: str) -> int:
    """Find the token of mask rows, a row of the embedding. keys: other names of mask_token_id"""
    fields = sources.fields
    key = fields.first("mask_token_id", *keys) or "mask_token_id"
    token = fields.need(int, key)
    sources.log.add("mask_token_id", token, fields.source(key))
    if token >= vocab_size > 0:
        rows = f"the embedding has rows 0 to {vocab_size - 1}"
        fields.problems.add(f"{fields.source(key)} is {token}, but {rows}")
    return token


def check_borrowing(config: DraftConfig, sources: Sources) -> None:
    """Refuse a draft that lacks an embedding or a head where the target's does not fit."""
    fields = sources.fields
    files = file_names(sources.held)
    D, Dt = config.layer.hidden_size, config.target_hidden_size
    V, W = config.vocab_size, config.draft_vocab_size
    if not config.has_own_embedding and Dt != D:
        needed = f"missing embed_tokens.weight [{V}, {D}]"
        fields.problems.add(f"{files}: {needed}: the target's, of width {Dt}, does not fit")
    if not config.has_own_head and (Dt != D or W != V):
        needed = f"missing lm_head.weight [{W}, {D}]"
        fields.problems.add(f"{files}: {needed}: the target's, [{V}, {Dt}], does not fit")
