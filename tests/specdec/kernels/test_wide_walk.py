"""The walk of large trees: the bits of the other walk, results left as one."""

from dataclasses import replace

import pytest
import torch

from graphs.cuda import CudaBackend
from graphs.modes import BatchDescriptor
from graphs.wrapper import capture_graph
from specdec.kernels import jit, tl
from specdec.kernels.attention import combine, launch, launch_plan
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.launch_plan import ALONE_WIDE_FROM, WIDE_FROM, plan_launch
from specdec.kernels.attention.parts import load_part
from specdec.kernels.attention.query_tiles import Heads
from specdec.kernels.attention.splits import add_part, num_splits
from specdec.kernels.attention.wide_walk import num_merged
from tests.specdec.kernels.tree_cases import Tree, random_tree, tree_case

FP16, BF16 = torch.float16, torch.bfloat16
BASES = (3071, 3072, 3135, 3136, 4095, 4096, 4352, 6000, 8191, 8192, 8704, 9300)
SHAPES = [(BF16, 128, 4), (BF16, 128, 5), (FP16, 128, 8), (BF16, 64, 4), (FP16, 64, 7)]


def test_large_trees_are_walked_wide():
    heads = Heads(4, 8, 128, 2)
    found = {
        (B, rows, keys): plan_launch(B, rows, heads, has_paths=True, most_keys=keys).is_wide
        for B in (1, 2)
        for rows in (16, 17, 32)
        for keys in (WIDE_FROM, ALONE_WIDE_FROM, ALONE_WIDE_FROM + 64, None)
    }
    wide = {each for each, is_wide in found.items() if is_wide}
    assert wide == {
        *((1, rows, keys) for rows in (17, 32) for keys in (ALONE_WIDE_FROM + 64, None)),
        *((2, rows, keys) for rows in (17, 32) for keys in (8192, 8256, None)),
    }
    chain, tree = (plan_launch(2, 32, heads, has_paths=each) for each in (False, True))
    assert not chain.is_wide
    assert tree.kind != tree._replace(is_wide=False).kind  # other kernels


@jit
def _merged_kernel(out_ptr, begin_ptr, sharers):
    i = tl.program_id(0)
    tl.store(out_ptr + i, num_merged(tl.load(begin_ptr + i), sharers))


def test_the_more_keys_the_more_splits_are_merged(exact_interpreter):
    begins = torch.tensor([0, 63, 64, 640, 1024, 3072, 4096, 8192, 16384, 32768])
    found = {}
    for sharers in (1, 2, 4, 16):
        out = torch.empty_like(begins)
        _merged_kernel[(len(begins),)](out, begins, sharers)
        found[sharers] = out.tolist()
    assert found[1] == [0] * 10  # one program takes all splits
    for merged in found.values():
        assert merged == sorted(merged)
        assert all(m <= min(b // 64, 16) for m, b in zip(merged, begins.tolist(), strict=True))
    assert found[2][5:] == [16] * 5
    # behind 4,096 keys 40 splits, 64 tiles
    assert (found[4][6], found[16][6]) == (16, (40 + 64) // 17)


@jit
def _merge_kernel(acc_ptr, stats_ptr, NS, count, C: tl.constexpr):
    """Leave the first parts of a row as one, where the last of them is."""
    row = tl.program_id(0)
    c = tl.arange(0, C)
    parts = acc_ptr, stats_ptr, row * NS
    peak, total, acc = tl.full((), float("-inf"), tl.float32), 0.0, tl.zeros((C,), tl.float32)
    for i in range(count):
        peak, total, acc = add_part(peak, total, acc, *load_part(parts, i, c, C))
    at = row * NS + count - 1
    tl.store(stats_ptr + at * 2, peak)
    tl.store(stats_ptr + at * 2 + 1, total)
    tl.store(acc_ptr + at * C + c, acc)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_rows_are_added_up_from_their_merged_splits_on(exact_interpreter, monkeypatch, is_ragged):
    """A slot behind many keys, one behind few, whose splits are not merged, and a row of none."""
    torch.manual_seed(0)
    trees = [random_tree(WIDE_FROM + 40, 3, 2), random_tree(200, 2 if is_ragged else 3, 1)]
    case = tree_case(trees, H=2, G=1, dtype=FP16, is_ragged=is_ragged)
    rows = replace(case.tree, workspace=torch.full((10**6,), torch.nan))
    out = torch.full_like(case.q, torch.nan)
    launch_paged_attention(case.q, out, case.cache, rows)
    assert out.isfinite().all()
    monkeypatch.setattr(combine, "num_sharers", lambda given: 4)
    given = launch._pass_of(case.q, case.cache, rows)
    given = given._replace(plan=given.plan._replace(is_wide=True))
    H, NS = 2, given.parts.num_splits
    merged = torch.empty(1, dtype=torch.int64)
    _merged_kernel[(1,)](merged, rows.paths.starts[:1], 4)
    count = int(merged)
    assert count > 1
    _merge_kernel[(3 * H,)](given.parts.acc, given.parts.stats, NS, count, 16)
    own = 3 * H * NS
    given.parts.acc[: own * 16].view(3 * H, NS, 16)[:, : count - 1] = torch.nan
    given.parts.stats[: own * 2].view(3 * H, NS, 2)[:, : count - 1] = torch.nan
    again = torch.full_like(out, torch.nan)
    combine.prepare_combine(given)(again)
    assert torch.equal(again, out)


@pytest.fixture
def walked(monkeypatch):
    """walked(case, rows): by this kernel, and as its yardstick by the other one."""

    def attend(case, rows=None):
        rows = case.tree if rows is None else rows
        rows = replace(rows, block_table=_wider(rows.block_table))
        with monkeypatch.context() as patched:
            patched.setattr(launch_plan, "_is_wide", lambda *_: False)
            expected = case.attend(launch_paged_attention, replace(rows))
        given = launch._pass_of(case.q, case.cache, rows)
        assert given.plan.is_wide
        return case.attend(launch_paged_attention, replace(rows)), expected

    return attend


def _wider(table):
    """For more keys than a single slot needs to be walked wide."""
    return torch.nn.functional.pad(table, (0, ALONE_WIDE_FROM // 64 + 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, C, group", SHAPES)
def test_a_gpu_gives_equal_bits_at_every_border(walked, dtype, C, group):
    torch.manual_seed(0)
    for base in BASES:
        for num_nodes in (17, 128 // group, 40):
            tree = random_tree(base, num_nodes, 6, seed=base)
            case = tree_case([tree], H=2 * group, G=2, C=C, dtype=dtype, device="cuda")
            found, expected = walked(case)
            assert torch.equal(found, expected), (base, num_nodes)
            plain = case.attend(launch_paged_attention, case.plain)
            assert torch.equal(found, plain), (base, num_nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("bases", [(5000, 300), (0, 3072, 9000, 64), (4000, 4001)])
def test_slots_of_all_lengths_share_a_launch(walked, bases, is_ragged):
    """Those of short trees are the other kernel's."""
    torch.manual_seed(0)
    counts = [32 - 7 * (i % 2) * is_ragged for i in range(len(bases))]
    trees = [random_tree(*each, 6) for each in zip(bases, counts, strict=True)]
    how = {"H": 16, "G": 4, "C": 128, "dtype": BF16, "device": "cuda", "is_ragged": is_ragged}
    case = tree_case(trees, **how)
    found, expected = walked(case)
    assert torch.equal(found, expected)
    assert torch.equal(found, case.attend(launch_paged_attention, case.plain))


@pytest.mark.gpu
@torch.inference_mode()
def test_a_captured_pass_goes_from_one_kernel_to_the_other():
    torch.manual_seed(0)
    how = {"H": 16, "G": 4, "C": 128, "dtype": BF16, "device": "cuda"}
    cases = [tree_case([random_tree(base, 32, 6)] * 2, **how) for base in (9000, 100, 3200)]
    first = cases[0]
    rows = replace(first.tree, max_seq_len=9216)
    out = torch.zeros_like(first.q)
    assert launch._pass_of(first.q, first.cache, rows).plan.is_wide
    launch_paged_attention(first.q, out, first.cache, rows)  # compiles
    pool = CudaBackend(torch.device("cuda")).new_pool()
    graph, _ = capture_graph(
        pool, BatchDescriptor(64), lambda: launch_paged_attention(first.q, out, first.cache, rows)
    )
    for case in (*cases[1:], first, cases[1]):
        size = case.tree.block_table.shape[1]
        expected = case.attend(launch_paged_attention, case.plain)
        if case is not first:
            rows.block_table[:, :size].copy_(case.tree.block_table)
            rows.positions.copy_(case.tree.positions)
            rows.paths.starts.copy_(case.tree.paths.starts)
            rows.paths.slots.copy_(case.tree.paths.slots)
            first.cache[:, : case.cache.shape[1]].copy_(case.cache)
            first.q.copy_(case.q)
            graph.replay()
            assert torch.equal(out, expected)


@pytest.mark.gpu
def test_padding_is_a_number_whatever_the_workspace_held(walked):
    """Rows of a slot behind its nodes, at position 0."""
    torch.manual_seed(0)
    tree = random_tree(5000, 32, 6)
    case = tree_case(
        [tree, Tree(base=4000, parents=tree.parents)], H=16, G=4, C=128, dtype=BF16, device="cuda"
    )
    positions = case.tree.positions.clone()
    positions[20:32] = 0
    size = 64 * 16 * num_splits(8192) * 130 + 4096
    workspace = torch.full((size,), torch.nan, device="cuda")
    found, expected = walked(case, replace(case.tree, positions=positions, workspace=workspace))
    assert found.isfinite().all()
    assert torch.equal(found[:20], expected[:20])
    assert torch.equal(found[32:], expected[32:])
