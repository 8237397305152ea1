"""Launches of attention for different rows of a pass overlap, and none reads too early."""

from dataclasses import replace

import pytest
import torch

from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.launch_plan import HeadShape, plan_launch, takes_prompt_kernel
from specdec.kernels.linear import Sums, launch_linear
from specdec.kernels.rotate_and_store import rotate_and_store
from tests.specdec.kernels.attention_cases import BF16, case, launches_of
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.kernels.tree_cases import random_tree, tree_case

GROUP, G, C = 4, 8, 128
TIMES = 40
BUSY = 100_000_000  # clocks
# contexts, and how many rows of each: those that verify, then parts of prompts
VERIFY_MANY = (300, 70, 190, 641) * 16, (4,) * 64  # one kernel walks all splits
VERIFY_FEW = (900, 300), (4, 4)  # two kernels: splits are shared, then added up
# three: a long slot's splits are shared while another walks, then added up
VERIFY_ONE_LONG = (300, 9000, *(70, 190) * 31), (4,) * 64
SHORT = (97, 130), (97, 30)  # for the kernel that walks
LONG = (700,), (300,)  # for that of prompts


@pytest.mark.gpu
@pytest.mark.parametrize("verify", [VERIFY_MANY, VERIFY_FEW, VERIFY_ONE_LONG])
@pytest.mark.parametrize("prompts", [SHORT, LONG])
def test_rows_beside_others_get_the_bits_of_rows_by_themselves(verify, prompts):
    """Each time other queries, keys and values, right before; and a product right after."""
    torch.manual_seed(0)
    heads = {"group": GROUP, "G": G, "C": C, "dtype": BF16, "device": "cuda"}
    (_, cache, first), (_, prompt_cache, second) = (
        case("normal", e, **heads) for e in (verify, prompts)
    )
    most_keys = None if verify is VERIFY_ONE_LONG else 1024
    plan = plan_launch(len(verify[0]), 4, HeadShape(GROUP, G, C, 2), most_keys=most_keys)
    assert plan.is_split == (verify is VERIFY_FEW)
    assert plan.is_helped == (verify is VERIFY_ONE_LONG)
    takes = takes_prompt_kernel(second, GROUP, 64, C, BF16, has_wgmma=True)
    assert takes == (prompts is LONG)
    # one cache for both
    num_before = cache.shape[1] - 1
    cache = torch.cat([cache[:, :-1], prompt_cache], dim=1)
    moved = torch.cat([second.block_table[:-1] + num_before, second.block_table[-1:] + num_before])
    second = replace(second, block_table=moved)
    groups = first, second
    positions = torch.cat([each.positions for each in groups])
    slots = torch.cat([slots_of(each) for each in groups])
    run = passes(positions, slots, cache)

    def beside(q, out, kv):
        both = first, replace(second, is_beside=True)
        for rows, at in zip(both, (0, first.num_rows), strict=True):
            launch_paged_attention(q[at:], out[at:], kv, rows)

    def alone(q, out, kv):
        for rows, at in zip(groups, (0, first.num_rows), strict=True):
            torch.cuda.synchronize()
            launch_paged_attention(q[at:], out[at:], kv, rows)
        torch.cuda.synchronize()

    expected = run(alone)
    run(beside)  # compiles
    assert torch.equal(run(beside), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_trees, num_nodes", [(2, 8), (40, 8), (1, 32), (4, 32)])
def test_rows_of_trees_get_the_bits_of_launches_one_by_one(num_trees, num_nodes):
    """Of many trees one program walks all splits of shared keys, of few they are shared.

    The last keys of large trees are attended to beside the walk of the others.
    """
    torch.manual_seed(0)
    bases = [(4200, 70, 1030, 40)[i % 4] for i in range(num_trees)]
    trees = [random_tree(base, num_nodes, 4, i) for i, base in enumerate(bases)]
    case = tree_case(trees, H=GROUP * G, G=G, C=C, dtype=BF16, device="cuda")
    plan = plan_launch(num_trees, num_nodes, HeadShape(GROUP, G, C, 2), has_paths=True)
    assert plan.is_split == (num_trees < 40)
    assert plan.is_wide == (num_nodes == 32)
    run = passes(case.tree.positions, case.node_slots, case.cache)

    def one_by_one(q, out, kv):
        for launch in launches_of(case.tree):
            torch.cuda.synchronize()
            launch(out, q, *kv.unbind(), None)
        torch.cuda.synchronize()

    def attend(q, out, kv):
        launch_paged_attention(q, out, kv, case.tree)

    run(attend)  # compiles
    assert len(launches_of(case.tree)) == 2 + plan.is_wide
    expected = run(one_by_one)
    assert not expected.isnan().any()
    assert torch.equal(run(attend), expected)


def passes(positions, slots, cache):
    """A call that computes TIMES passes over copies of the cache, by a call for their attention."""
    T = len(positions)
    rope = torch.randn(2, 9216, C // 2, device="cuda").unbind()
    weight = torch.randn(256, GROUP * G * C, device="cuda").to(BF16)
    qkvs = torch.randn(TIMES, 1, T, (GROUP + 2) * G * C, device="cuda")

    def run(attend):
        kv = cache.clone()
        found = []
        torch.cuda._sleep(BUSY)  # all launches wait for it, and follow each other at once
        for qkv in qkvs:
            q = by_kernel(rotate_and_store)(Sums(qkv, None), rope, None, (positions, slots), kv)
            out = torch.empty_like(q)
            attend(q, out, kv)
            found.append(launch_linear(out.flatten(1), weight, None, BF16))
        return torch.stack(found)

    return run


def slots_of(rows):
    """Cache slot of each row."""
    counts = rows.query_start_loc
    B = len(rows.idx_mapping)
    if counts is None:
        slot = torch.arange(B, device="cuda").repeat_interleave(rows.max_query_len)
    else:
        slot = torch.arange(B, device="cuda").repeat_interleave(counts.diff())
    return rows.block_table[slot, rows.positions // 64] * 64 + rows.positions % 64
