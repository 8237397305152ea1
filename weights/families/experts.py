"""The experts of a target: how many, who has them, and what the router's weights add up to."""

from weights.config import ExpertsConfig
from weights.families.family import ExpertsRow
from weights.fields import Fields
from weights.report import Log

NUM = ("num_experts", "num_local_experts")  # transformers 5 writes the second for the first
TENSORS = 3  # of an expert whose files have it apart from others


def read_experts(fields: Fields, row: ExpertsRow, log: Log) -> ExpertsConfig:
    """Read what all layers of experts have in common."""
    switch = row.renormalise
    experts = ExpertsConfig(
        num=_read_num(fields, row.num),
        per_token=fields.get(int, "num_experts_per_tok", row.per_token),
        width=_read_width(fields, row),
        renormalise=fields.get(bool, switch, False) if isinstance(switch, str) else switch,
        is_stacked=row.is_stacked,
    )
    if experts.per_token > experts.num:
        what = f"num_experts_per_tok is {experts.per_token}, and there are {experts.num} experts"
        fields.add_problem(what, fatal=True)
    log.add("num_experts", experts.num, fields.source(*NUM))
    log.add("experts_per_token", experts.per_token, fields.source("num_experts_per_tok"))
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


def _read_num(fields: Fields, default: int) -> int:
    found = {key: fields.find(int, key) for key in NUM if key in fields}
    if len(found) == len(NUM) and len(set(found.values())) > 1:
        named = " and ".join(f"{key} is {value}" for key, value in found.items())
        fields.add_problem(f"{named}: keep one", fatal=True)
    return next((value for value in found.values() if value is not None), default)


def _read_width(fields: Fields, row: ExpertsRow) -> int:
    if row.default_width is None:
        return fields.need(int, row.width)
    return fields.get(int, row.width, row.default_width)
