"""The walk of large trees: the bits of the other walk, results left as one."""

from dataclasses import replace

import pytest
import torch

from graphs.cuda import CudaBackend
from graphs.modes import BatchDescriptor
from graphs.wrapper import capture_graph
from specdec.kernels import jit, tl
from specdec.kernels.attention import combine, launch, wide_splits
from specdec.kernels.attention.arguments import workspace_size
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.launch_plan import WIDE_FROM, HeadShape, plan_launch
from specdec.kernels.attention.path_tails import TailPrograms
from specdec.kernels.attention.splits import (
    add_part,
    no_keys,
    num_splits,
    split_start,
    tiles_of_split,
)
from specdec.kernels.attention.walk import prepare_walk
from specdec.kernels.attention.wide_splits import (
    WalkPrograms,
    first_split,
    list_at,
    merged_before,
    merges,
    num_merged,
    num_sharing,
    splits_by_program,
    table_of_splits,
    walk_programs,
)
from tests.specdec.kernels.attention_cases import load_part
from tests.specdec.kernels.tree_cases import Tree, random_tree, tree_case

FP16, BF16 = torch.float16, torch.bfloat16
BASES = (3071, 3072, 3135, 3136, 4095, 4096, 4352, 6000, 8191, 8192, 8704, 9300)
SHAPES = [(BF16, 128, 4), (BF16, 128, 5), (FP16, 128, 8), (BF16, 64, 4), (FP16, 64, 7)]


def pass_of(case, rows):
    """What kernels of these rows are prepared from."""
    return launch._pass_of(case.q, case.cache, rows, case.q.shape[-1] ** -0.5)


def test_large_trees_are_walked_wide():
    heads = HeadShape(4, 8, 128, 2)
    found = {
        (B, rows, keys): plan_launch(B, rows, heads, has_paths=True, most_keys=keys).is_wide
        for B in (1, 2)
        for rows in (16, 17, 32)
        for keys in (WIDE_FROM, WIDE_FROM + 64, None)
    }
    wide = {each for each, is_wide in found.items() if is_wide}
    assert wide == {(B, rows, k) for B in (1, 2) for rows in (17, 32) for k in (3136, None)}
    chain, tree = (plan_launch(2, 32, heads, has_paths=each) for each in (False, True))
    assert not chain.is_wide
    assert tree.kind != tree._replace(is_wide=False).kind  # other kernels


def num_tiles(splits):
    """Count the tiles of 64 keys, by the borders of splits."""
    return sum((64, 128, 256, 512)[(s >= 16) + (s >= 40) + (s >= 56)] // 64 for s in splits)


def times(count, sharers):
    """Time each program in tiles, if to leave a result takes as long as one."""
    merged = num_merged(count, sharers)
    programs = splits_by_program(count, sharers)
    results = [1 if merged and i == sharers - 1 else len(own) for i, own in enumerate(programs)]
    return [num_tiles(own) + left for own, left in zip(programs, results, strict=True)]


COUNTS = [0, 1, 2, 15, 16, 17, 39, 40, 55, 56, 57, 72, 100, 296]


@pytest.mark.parametrize("sharers", [1, 2, 3, 4, 7, 14, 16, 66])
def test_each_split_is_taken_once(sharers):
    for count in COUNTS:
        programs = splits_by_program(count, sharers)
        assert len(programs) == sharers
        assert sorted(split for own in programs for split in own) == list(range(count))
        merged = num_merged(count, sharers)
        others = programs[:-1] if merged else programs
        assert all(own == sorted(own, reverse=True) for own in others)
        if merged:
            assert programs[-1] == list(range(merged))
            assert merged <= 16


def test_no_program_takes_much_longer_than_the_others():
    for count in COUNTS:
        for sharers in (14, 16):
            found = times(count, sharers)
            longest_split = num_tiles([count - 1]) + 1 if count else 0
            most = max(1.1 * sum(found) / sharers + 2, longest_split)
            assert max(found) <= most, (count, sharers)


@pytest.mark.parametrize("sharers", [WalkPrograms(14, 14), WalkPrograms(14, 12)])
def test_the_table_lists_the_shares(sharers):
    table = table_of_splits(72, sharers, torch.device("cpu"))
    assert table.dtype == torch.int16
    assert len(table) == len({*sharers})
    for half, sharing in zip(table, sharers, strict=False):
        for count in range(73):
            programs = splits_by_program(count, sharing)
            for i in range(14):
                own = programs[i] if i < sharing else []
                tiles, *splits = half[count, i].tolist()
                assert tiles == num_tiles(own)
                assert splits[: len(own)] == own
                assert splits[len(own) :] == [0] * (len(splits) - len(own))
                assert len(splits) >= len(own) + 2  # the next one is loaded ahead


@jit
def _shares_kernel(out_ptr, begin_ptr, sharers, fewer, counts, width):
    begin, turn = tl.load(begin_ptr + tl.program_id(0)), tl.program_id(1)
    at = out_ptr + (tl.program_id(0) * sharers + turn) * 5
    sharing = num_sharing(begin, sharers, fewer)
    tl.store(at, merges(turn, sharing))
    tl.store(at + 1, first_split(begin, turn, sharing))
    tl.store(at + 2, merged_before(begin, sharing))
    tl.store(at + 3, sharing)
    tl.store(at + 4, list_at(begin, turn, sharing, sharers, counts, width))


@pytest.mark.parametrize(
    "sharers",
    [
        WalkPrograms(1, 1),
        WalkPrograms(2, 2),
        WalkPrograms(7, 6),
        WalkPrograms(14, 14),
        WalkPrograms(14, 12),
        pytest.param(WalkPrograms(66, 60), marks=pytest.mark.slow),
    ],
)
def test_programs_know_their_first_split_without_the_table(exact_interpreter, sharers):
    begins = [0, 63, 64, 500, 1023, 1024, 1151, 1152, 3000, 4096, 4250, 5000, 8192, 9999]
    most = num_splits(10000)
    table = table_of_splits(most, sharers, torch.device("cpu"))
    out = torch.zeros(len(begins), sharers.most, 5, dtype=torch.int64)
    sizes = *sharers, most + 1, table.shape[-1]
    _shares_kernel[out.shape[:2]](out, torch.tensor(begins), *sizes)
    for begin, found in zip(begins, out.tolist(), strict=True):
        count = num_splits(begin + 1) - 1  # before the split of that key
        (sharing,) = {each[3] for each in found}
        assert sharing in sharers
        merged = num_merged(count, sharing)
        programs = [*splits_by_program(count, sharing), *[[]] * (sharers.most - sharing)]
        for i, own in enumerate(programs):
            found_merges, first, found_merged, _, at = found[i]
            assert found_merged == merged
            assert found_merges == (i == sharing - 1 > 0)
            listed = table.flatten()[at : at + 1 + len(own)].tolist()
            assert listed == [num_tiles(own), *own]
            if own:
                assert own[0] == first


def test_fewer_programs_walk_where_last_keys_take_longer(exact_interpreter):
    """The more of their split they go through first; the less, the more there is to walk."""
    begins = [*range(3072, 4096, 64), *range(4096, 4352, 64), *range(8192, 8704, 64)]
    begins += range(16384, 16896, 64)
    out = torch.zeros(len(begins), 14, 5, dtype=torch.int64)
    _shares_kernel[out.shape[:2]](out, torch.tensor(begins), 14, 12, 0, 0)
    few = {begin for begin, found in zip(begins, out[:, 0, 3].tolist(), strict=True) if found == 12}
    in_middles = [4160, 4224, 4288, *range(8192 + 192, 8704, 64), 16384 + 448]
    assert few == {*range(3072, 3840, 64), *range(3904, 4096, 128), *in_middles}


def test_programs_for_last_keys_get_room_to_run_at_once(monkeypatch):
    monkeypatch.setattr(wide_splits, "num_multiprocessors", lambda device: 132)
    found = {}
    for B, rows, G in ((1, 32, 8), (1, 24, 8), (2, 32, 8), (8, 32, 8), (1, 32, 4), (20, 32, 8)):
        trees = [Tree(base=200, parents=[-1] + [0] * (rows - 1))] * B
        case = tree_case(trees, H=4 * G, G=G, dtype=FP16)
        found[B, rows, G] = walk_programs(pass_of(case, case.tree))
    assert found == {
        (1, 32, 8): WalkPrograms(14, fewer=12),  # 64 programs for last keys, on 36 multiprocessors
        (1, 24, 8): WalkPrograms(14, fewer=13),
        (2, 32, 8): WalkPrograms(7, fewer=7),  # room for all would take more than a seventh
        (8, 32, 8): WalkPrograms(2, fewer=2),
        (1, 32, 4): WalkPrograms(33, fewer=33),  # none are left for them: not measured with fewer
        (20, 32, 8): WalkPrograms(1, fewer=1),  # more places than multiprocessors
    }


def test_a_program_merges_as_many_splits_as_it_has_time_for():
    cases = [(0, 14), (4, 14), (40, 14), (40, 4), (72, 14), (40, 1)]
    assert [num_merged(count, sharers) for count, sharers in cases] == [0, 1, 5, 12, 16, 0]


@jit
def _merge_kernel(acc_ptr, stats_ptr, NS, count, C: tl.constexpr):
    """Leave the first parts of a row as one, where the last of them is."""
    row = tl.program_id(0)
    c = tl.arange(0, C)
    parts = acc_ptr, stats_ptr, row * NS
    peak, total, acc = no_keys(1, C)
    for i in range(count):
        peak, total, acc = add_part(peak, total, acc, *load_part(parts, i, c, C))
    at = row * NS + count - 1 + tl.arange(0, 1)
    tl.store(stats_ptr + at * 2, peak)
    tl.store(stats_ptr + at * 2 + 1, total)
    tl.store(acc_ptr + at[:, None] * C + c[None, :], acc)


@jit
def _borders_kernel(out_ptr):
    split = tl.program_id(0)
    tl.store(out_ptr + split, split_start(split))


def test_the_host_knows_how_many_tiles_a_split_has(exact_interpreter):
    """Warps that count others would wait for each other for ever."""
    starts = torch.zeros(120, dtype=torch.int64)
    _borders_kernel[(120,)](starts)
    assert starts.diff().tolist() == [tiles_of_split(split) * 64 for split in range(119)]


@pytest.mark.parametrize("bases", [(1100, 200), (40, 3100)])
def test_last_keys_have_a_launch_of_their_own_beside_the_walk(exact_interpreter, bases):
    """They leave what they leave where other programs walk the shared keys."""
    torch.manual_seed(0)
    trees = [random_tree(base, 4, 2, seed=base) for base in bases]
    case = tree_case(trees, H=2, G=1, dtype=FP16)
    found = []
    for is_wide in (False, True):
        rows = replace(case.tree, workspace=torch.full((10**6,), torch.nan))
        given = pass_of(case, rows)
        given = given._replace(plan=given.plan._replace(is_wide=is_wide))
        prepared = prepare_walk(given)
        prepared(torch.empty_like(case.q), case.q, *case.cache.unbind(), None)
        found.append((prepared, given.parts))
    (whole, both), (alone, last) = found
    num_tails = 2 * TailPrograms.of(4, 3, HeadShape(2, 1, 16, 2)).of_slot
    assert alone._grid == (num_tails, 1, 1)
    assert whole._grid[0] > num_tails
    own = 8 * 2 * last.num_splits
    written = ~last.stats[: own * 2].isnan()
    assert torch.equal(last.stats[: own * 2][written], both.stats[: own * 2][written])
    splits = written.view(8, 2, -1, 2).any((1, 3))
    for row, position in enumerate(case.tree.positions.tolist()):
        begin = num_splits(bases[row // 4] // 64 * 64 + 1) - 1
        assert splits[row].nonzero().flatten().tolist() == list(
            range(begin, num_splits(position + 1))
        )
    of_splits = both.acc[: own * 16].view(8, 2, -1, 16), last.acc[: own * 16].view(8, 2, -1, 16)
    assert torch.equal(*(acc[splits[:, None].expand(8, 2, -1)] for acc in of_splits))


def test_padding_is_added_up_where_splits_are_merged(exact_interpreter, monkeypatch):
    """A row at position 0 of a slot behind many keys reads the merged result."""
    torch.manual_seed(0)
    case = tree_case([random_tree(WIDE_FROM + 40, 3, 2)], H=2, G=1, dtype=FP16)
    monkeypatch.setattr(combine, "walk_programs", lambda given: WalkPrograms(4, 4))
    positions = case.tree.positions.index_fill(0, torch.tensor([2]), 0)
    rows = replace(case.tree, positions=positions, workspace=torch.full((10**6,), torch.nan))
    given = pass_of(case, rows)
    given = given._replace(plan=given.plan._replace(is_wide=True))
    merged, NS = num_merged(num_splits(WIDE_FROM), 4), given.parts.num_splits
    assert merged > 1
    given.parts.acc[: 3 * 2 * NS * 16].view(3, 2, NS, 16)[:, :, merged - 1 :] = 6.0
    given.parts.stats[: 3 * 2 * NS * 2].view(3, 2, NS, 2)[:, :, merged - 1 :] = 2.0
    out = torch.full_like(case.q, torch.nan)
    combine.prepare_combine(given)(out, None)
    assert (out == 3.0).all()


@pytest.mark.parametrize(
    "sharers", [WalkPrograms(4, 4), pytest.param(WalkPrograms(14, 12), marks=pytest.mark.slow)]
)
def test_rows_are_added_up_from_their_merged_splits_on(forget, monkeypatch, sharers):
    """A slot behind many keys, and one behind few, of which one split is left by itself.

    Where fewer programs share the splits, more of them are left as one.
    """
    torch.manual_seed(0)
    trees = [random_tree(WIDE_FROM + 40, 3, 2), random_tree(200, 3, 1)]
    case = tree_case(trees, H=2, G=1, dtype=FP16)
    rows = replace(case.tree, workspace=torch.full((10**6,), torch.nan))
    out = torch.full_like(case.q, torch.nan)
    launch_paged_attention(case.q, out, case.cache, rows)
    assert out.isfinite().all()
    monkeypatch.setattr(combine, "walk_programs", lambda given: sharers)
    given = pass_of(case, rows)
    given = given._replace(plan=given.plan._replace(is_wide=True))
    H, NS = 2, given.parts.num_splits
    count = num_merged(num_splits(WIDE_FROM), sharers.fewer)
    assert count > 1
    assert (count > num_merged(num_splits(WIDE_FROM), sharers.most)) == (
        sharers.fewer < sharers.most
    )
    _merge_kernel[(3 * H,)](given.parts.acc, given.parts.stats, NS, count, 16)
    own = 3 * H * NS
    given.parts.acc[: own * 16].view(3 * H, NS, 16)[:, : count - 1] = torch.nan
    given.parts.stats[: own * 2].view(3 * H, NS, 2)[:, : count - 1] = torch.nan
    again = torch.full_like(out, torch.nan)
    combine.prepare_combine(given)(again, None)
    assert torch.equal(again, out)
    forget()
    combine.prepare_combine(given)(again.fill_(torch.nan), None)
    assert torch.equal(again, out)
    assert given.parts.acc[: own * 16].isnan().all()


@pytest.fixture
def walked(monkeypatch):
    """walked(case, rows): by this kernel, and as its yardstick by the other one."""

    def attend(case, rows=None):
        rows = case.tree if rows is None else rows
        more = max(WIDE_FROM // 64 + 1 - rows.block_table.shape[1], 0)  # blocks that no key is in
        table = torch.nn.functional.pad(rows.block_table, (0, more))
        longest = max(rows.max_seq_len, WIDE_FROM + 1)
        rows = replace(rows, block_table=table, max_seq_len=longest)
        with monkeypatch.context() as patched:
            patched.setattr(launch, "is_hopper", lambda device: False)
            expected = case.attend(launch_paged_attention, replace(rows))
        given = pass_of(case, rows)
        assert given.plan.is_wide
        return case.attend(launch_paged_attention, replace(rows)), expected

    return attend


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, C, group", SHAPES)
def test_a_gpu_gives_equal_bits_at_every_border(walked, dtype, C, group):
    torch.manual_seed(0)
    for base in BASES:
        for num_nodes in (17, 128 // group, 40):
            tree = random_tree(base, num_nodes, 6, seed=base)
            case = tree_case([tree], H=2 * group, G=2, C=C, dtype=dtype, device="cuda")
            longest = max(case.tree.max_seq_len, 9300 if num_nodes == 17 else 0)  # more splits
            found, expected = walked(case, replace(case.tree, max_seq_len=longest))
            assert torch.equal(found, expected), (base, num_nodes)
            plain = case.attend(launch_paged_attention, case.plain)
            assert torch.equal(found, plain), (base, num_nodes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "group, G, num_nodes", [(4, 4, 32), (4, 4, 33), (16, 2, 8), (8, 8, 16), (5, 4, 20), (7, 2, 40)]
)
@pytest.mark.parametrize("bases", [(5000, 300), (0, 3072, 9000, 64), (4000, 4001), (4000,) * 10])
def test_slots_of_all_lengths_share_a_launch(walked, bases, group, G, num_nodes):
    """Short trees, too, and some without a shared tile.

    Of ten with 8 kv heads each has one program. Tiles may be cut off at the ends of slots, and
    between heads.
    """
    torch.manual_seed(0)
    trees = [random_tree(base, num_nodes, 6, seed=i) for i, base in enumerate(bases)]
    case = tree_case(trees, H=group * G, G=G, C=128, dtype=BF16, device="cuda")
    found, expected = walked(case)
    assert torch.equal(found, expected)
    assert torch.equal(found, case.attend(launch_paged_attention, case.plain))


@pytest.mark.gpu
@torch.inference_mode()
def test_a_captured_pass_serves_short_and_long_trees():
    torch.manual_seed(0)
    how = {"H": 16, "G": 4, "C": 128, "dtype": BF16, "device": "cuda"}
    cases = [tree_case([random_tree(base, 32, 6)] * 2, **how) for base in (9000, 100, 4096)]
    first = cases[0]
    rows = replace(first.tree, max_seq_len=9216)
    out = torch.zeros_like(first.q)
    assert pass_of(first, rows).plan.is_wide
    launch_paged_attention(first.q, out, first.cache, rows)  # compiles
    pool = CudaBackend(torch.device("cuda")).new_pool()
    graph, _ = capture_graph(
        pool, BatchDescriptor(64), lambda: launch_paged_attention(first.q, out, first.cache, rows)
    )
    # short, long, short, long; behind 4,096 keys on an H200 more programs share the splits
    for case in (*cases[1:], *cases[1:]):
        size = case.tree.block_table.shape[1]
        rows.block_table[:, :size].copy_(case.tree.block_table)
        rows.positions.copy_(case.tree.positions)
        rows.paths.starts.copy_(case.tree.paths.starts)
        rows.paths.slots.copy_(case.tree.paths.slots)
        first.cache[:, : case.cache.shape[1]].copy_(case.cache)
        first.q.copy_(case.q)
        graph.replay()
        assert torch.equal(out, case.attend(launch_paged_attention, case.plain))


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
    size = workspace_size(64, 16, 128, case.tree.max_seq_len)
    workspace = torch.full((size,), torch.nan, device="cuda")
    rows = replace(case.tree, positions=positions, workspace=workspace)
    assert pass_of(case, rows).parts.acc is workspace
    found, expected = walked(case, rows)
    assert found.isfinite().all()
    assert torch.equal(found[:20], expected[:20])
    assert torch.equal(found[32:], expected[32:])
