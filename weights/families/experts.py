"""The experts of a target: how many, who has them, and what the router's weights add up to."""

from weights.config import Clamp, ExpertsConfig
from weights.families.family import ExpertsRow
from weights.fields import Fields
from weights.report import Log

NUM = ("num_experts", "num_local_experts")  # transformers 5 writes the second for the first
PER_TOKEN = ("num_experts_per_tok", "experts_per_token")  # the second is gpt-oss's older name
BLOCK = 32  # columns of an MXFP4 weight that share a scale
TENSORS = 3  # of an expert whose files have it apart from others


def read_experts(fields: Fields, row: ExpertsRow, log: Log) -> ExpertsConfig:
    """Read what all layers of experts have in common."""
    switch = row.renormalise
    experts = ExpertsConfig(
        num=_read_one_of(fields, NUM, row.num),
        per_token=_read_one_of(fields, PER_TOKEN, row.per_token),
        width=_read_width(fields, row),
        renormalise=fields.get(bool, switch, False) if isinstance(switch, str) else switch,
        is_stacked=row.is_stacked,
        is_turned=row.is_turned,
        has_biases=row.has_biases,
        clamp=_read_clamp(fields, row.clamp, log),
    )
    if experts.per_token > experts.num:
        what = f"num_experts_per_tok is {experts.per_token}, and there are {experts.num} experts"
        fields.add_problem(what, fatal=True)
    log.add("num_experts", experts.num, fields.source(*NUM))
    log.add("experts_per_token", experts.per_token, fields.source(*PER_TOKEN))
    log.add("expert_width", experts.width, fields.source(row.width))
    source = fields.source(switch) if isinstance(switch, str) else "the model family"
    log.add("renormalise", experts.renormalise, source)
    return experts


def have_experts(fields: Fields, row: ExpertsRow, num_layers: int, log: Log) -> list[bool]:
    """Tell for each layer whether it has experts."""
    step, dense = 1, frozenset[int]()
    if row.has_dense_layers:
        step = fields.get(int, "decoder_sparse_step", 1)
        dense = frozenset(fields.ints("mlp_only_layers") or ())
    found = [i not in dense and (i + 1) % max(step, 1) == 0 for i in range(num_layers)]
    source = fields.source("decoder_sparse_step", "mlp_only_layers")
    log.add(
        "layers_with_experts", sum(found), source if row.has_dense_layers else "the model family"
    )
    return found


def check_count(fields: Fields, experts: ExpertsConfig, num_layers: int, num_tensors: int) -> None:
    """Refuse more experts than there are tensors, before each of theirs is named."""
    if not experts.is_stacked and experts.num * num_layers * TENSORS > num_tensors:
        counts = f"{experts.num} experts in {num_layers} layers, but only {num_tensors} tensors"
        fields.problems.add(f"{fields.source(*NUM)}: {counts}", fatal=True)


def check_blocks(fields: Fields, hidden_size: int, width_key: str, width: int) -> None:
    """Refuse products whose rows are no whole blocks of a scale."""
    for key, size in (("hidden_size", hidden_size), (width_key, width)):
        if size % BLOCK:
            line = f"{key} is {size}, a multiple of {BLOCK} is needed for MXFP4"
            fields.add_problem(line, fatal=True)


def _read_one_of(fields: Fields, keys: tuple[str, ...], default: int) -> int:
    """Read a number that has several names; those that are there must agree."""
    found = {key: fields.find(int, key) for key in keys if key in fields}
    if len(set(found.values())) > 1:
        named = " and ".join(f"{key} is {value}" for key, value in found.items())
        fields.add_problem(f"{named}: keep one", fatal=True)
    return next((value for value in found.values() if value is not None), default)


def _read_width(fields: Fields, row: ExpertsRow) -> int:
    if row.default_width is None:
        return fields.need(int, row.width)
    return fields.get(int, row.width, row.default_width)


def _read_clamp(fields: Fields, default: Clamp | None, log: Log) -> Clamp | None:
    if default is None:
        return None
    clamp = Clamp(
        limit=fields.get(float, "swiglu_limit", default.limit),
        alpha=fields.get(float, "swiglu_alpha", default.alpha),
    )
    log.add("swiglu_limit", clamp.limit, fields.source("swiglu_limit"))
    log.add("swiglu_alpha", clamp.alpha, fields.source("swiglu_alpha"))
    return clamp
