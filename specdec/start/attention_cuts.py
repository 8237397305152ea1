"""Which rounds and chunks take each kind of attention that an engine may need.

A kind is what decides which kernels are launched (launch_plan.py): it follows from the requests and
rows of a pass, and, where these make many programs or have paths, from its longest context.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from specdec.kernels.attention.launch_plan import Launch, key_bounds, plan_launch
from specdec.runner import Runner
from specdec.sizes import TreeShape


def shared_cuts(runner: Runner) -> Iterable[tuple[int, int, int | None]]:
    """Find requests, rows and keys for each kind of attention, where rows are shared out."""
    sizes = runner.sizes
    found: dict[object, tuple[int, int, int | None]] = {}
    if not sizes.is_adaptive:
        return ()
    for count in range(1, sizes.max_num_seqs + 1):
        for each in range(1, min(sizes.query_len, -(-sizes.max_verify_rows // count)) + 1):
            rows = min(each * count, sizes.max_verify_rows)

            def plans(longest: int | None, count: int = count, each: int = each) -> list[Launch]:
                return [
                    plan_launch(count, most, heads, usual_query_len=usual, most_keys=longest)
                    for heads in runner.heads
                    for most, usual in ((sizes.query_len, each), (1, 1))  # the last of seeds
                ]

            for kind, longest in _kinds(plans, sizes.most_keys):
                found.setdefault(kind, (count, rows, longest))
    return found.values()


def attention_cuts(
    runner: Runner, query_lens: Iterable[int], max_rows: int, tree: TreeShape | None = None
) -> Iterable[tuple[int, int, int | None]]:
    """Find rows of a request, requests and a bound on their keys for each kind of launch.

    tree: what rows after the first are nodes of; None: they are chains, or prompts
    """
    found: dict[object, tuple[int, int, int | None]] = {}
    for query_len in query_lens:
        most = min(runner.sizes.max_num_seqs, max(max_rows // query_len, 1))
        for count in range(1, most + 1):
            plans = partial(_plans, runner, count, query_len, tree)
            for kind, longest in _kinds(plans, runner.sizes.most_keys):
                found.setdefault(kind, (query_len, count, longest))
    return found.values()


def tree_cuts(runner: Runner) -> Iterable[tuple[int, int | None]]:
    """Find requests and keys for each kind, where rounds of trees are beside those of chains."""
    sizes = runner.sizes
    found: dict[object, tuple[int, int | None]] = {}
    if not sizes.has_both or sizes.tree is None:
        return ()
    for count in range(1, sizes.max_tree_requests + 1):
        rows = sizes.shape_of(count, is_wide=True).rows
        plans = partial(_plans, runner, count, rows, sizes.tree)
        for kind, longest in _kinds(plans, sizes.most_keys):
            found.setdefault(kind, (count, longest))
    return found.values()


def _plans(
    runner: Runner, count: int, query_len: int, tree: TreeShape | None, longest: int | None
) -> list[Launch]:
    passes = [(query_len, False)]
    if tree is not None and query_len > 1:  # nodes, the draft's levels, accepted paths
        passes = [(query_len, True), (tree.top_k, True), (tree.path_len, False)]
    return [
        plan_launch(count, rows, heads, has_paths=has_paths, most_keys=longest)
        for heads in runner.heads
        for rows, has_paths in (*passes, (1, False))  # the last layer of prompts and of drafts
    ]


def _kinds(
    plans: Callable[[int | None], list[Launch]], most_keys: int | None
) -> Iterator[tuple[object, int | None]]:
    """List the kinds of launches, each with a bound on keys; most are the same below it."""
    for longest in reversed(key_bounds(most_keys)):
        found = plans(longest)
        yield tuple(plan.kind for plan in found), longest
        if not any(plan.is_helped or plan.is_wide for plan in found):
            return
