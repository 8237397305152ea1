"""Attention over the rows of a pass: its kernels, prepared once for all layers of a kind."""

from collections.abc import Callable

from torch import Tensor

from specdec.kernels import is_hopper, launch_options, pick
from specdec.kernels.attention.arguments import Pass, room_for_parts
from specdec.kernels.attention.combine import prepare_combine, prepare_combine_long
from specdec.kernels.attention.launch_plan import (
    HeadShape,
    Launch,
    plan_launch,
    plan_listed,
    takes_prompt_kernel,
)
from specdec.kernels.attention.query_rows import QueryRows
from specdec.kernels.attention.shared_splits import prepare_share
from specdec.kernels.attention.twin import paged_attention_ref
from specdec.kernels.attention.walk import prepare_walk
from specdec.kernels.attention.wide_walk import WideWalk
from specdec.kernels.needed import need
from specdec.kernels.prompt.attention import PromptAttention, is_fit


def paged_attention(
    q_THC: Tensor,
    out_THC: Tensor,
    cache: Tensor,
    rows: QueryRows,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> None:
    """Overwrite the first rows of out_THC with their attention, as many as `rows` has.

    cache:   [2, N + 1, G, S, C] of one layer
    scale:   of scores, above 0; None: C^-0.5
    window:  a row at position p sees keys p - window < k <= p; None: all up to p
    sinks_H: float32, one more score of each head, scaled already, that has no value
    """
    how = pick(q_THC, launch_paged_attention, paged_attention_ref)
    how(q_THC, out_THC, cache, rows, scale, window, sinks_H)


def launch_paged_attention(
    q_THC: Tensor,
    out_THC: Tensor,
    cache: Tensor,
    rows: QueryRows,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> None:
    kind = q_THC.shape[1:], cache.shape, scale, window, sinks_H is None
    if kind not in rows.launches:
        has_sinks = sinks_H is not None
        rows.launches[kind] = _prepare(q_THC, cache, rows, scale, window, has_sinks)
    tensors = out_THC, q_THC, *cache.unbind(), sinks_H
    for each in rows.launches[kind]:
        each(*tensors)


def _prepare(
    q_THC: Tensor,
    cache: Tensor,
    rows: QueryRows,
    scale: float | None,
    window: int | None,
    has_sinks: bool,
) -> list[Callable[..., None]]:
    """Prepare the kernels of each layer of this kind, called with out, q, k, v and sinks."""
    _, _, G, S, C = cache.shape
    group = q_THC.shape[1] // G
    scale = C**-0.5 if scale is None else scale
    if takes_prompt_kernel(rows, group, S, C, q_THC.dtype, is_hopper(q_THC.device)):
        return [PromptAttention(q_THC, cache, rows, scale, window)]
    given = _pass_of(q_THC, cache, rows, scale, window, has_sinks)
    plan = given.plan
    if plan.is_helped:
        walk = prepare_walk(given)
        # adding up waits for what was shared, and runs beside the walk of the other slots
        share, combine = _of_keys(prepare_share(given)), prepare_combine_long(given)
        return [share, _of_results(combine), walk]
    if plan.teams:
        return [_of_keys(prepare_share(given)), _of_results(prepare_combine(given))]
    if plan.is_split or plan.has_paths:
        adds_up = _of_results(prepare_combine(given))
        launches: list[Callable[..., None]] = [prepare_walk(given), adds_up]
        if plan.is_wide:
            launches.insert(0, _of_keys(WideWalk(given, q_THC, cache)))
        return launches
    return [prepare_walk(given)]


def _of_keys(kernel: Callable[..., None]) -> Callable[..., None]:
    return lambda out, q, k, v, sinks: kernel(q, k, v)


def _of_results(kernel: Callable[..., None]) -> Callable[..., None]:
    return lambda out, q, k, v, sinks: kernel(out, sinks)


def _plan_of(rows: QueryRows, heads: HeadShape, S: int) -> Launch:
    if rows.listed is not None:
        return plan_listed(heads)
    return plan_launch(
        len(rows.idx_mapping),
        rows.max_query_len,
        heads,
        has_paths=rows.paths is not None,
        usual_query_len=rows.usual_query_len,
        most_keys=min(rows.block_table.shape[1] * S, rows.max_seq_len),
    )


def _pass_of(
    q_THC: Tensor,
    cache: Tensor,
    rows: QueryRows,
    scale: float,
    window: int | None = None,
    has_sinks: bool = False,
) -> Pass:
    _, H, C = q_THC.shape
    _, _, G, S, _ = cache.shape
    heads = HeadShape(H // G, G, C, q_THC.element_size(), window)
    plan = _plan_of(rows, heads, S)
    if plan.is_wide:
        # slots of different lengths, launches that may turn out not to be needed, and sinks, which
        # begin a row's whole before the first splits are added up, are walk.py's
        is_usual = rows.query_start_loc is None and need()["needed_ptr"] is None and not has_sinks
        if not (is_usual and is_hopper(q_THC.device) and is_fit(heads.group, S, C, q_THC.dtype)):
            plan = plan._replace(is_wide=False)
    parts = room_for_parts(rows, plan, H, C, q_THC.device)
    # Round where the source rounds. A tile without a mask would otherwise have its scale fused with
    # the subtraction of the peak, and other bits than the same tile with one.
    options = {**launch_options(q_THC), "enable_fp_fusion": False}
    constants = {"H": H, "G": G, "S": S, "C": C, "PDL": options["PDL"]}
    return Pass(rows, plan, parts, heads, scale, constants, options)
