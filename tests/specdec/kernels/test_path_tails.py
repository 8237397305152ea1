"""A row that reads its last keys by slots gets the bits of plain decoding, kernel and twin."""

import copy
import itertools
from dataclasses import replace
from itertools import product

import pytest
import torch

from graphs.cuda import CudaBackend
from graphs.modes import BatchDescriptor
from graphs.tape.backend import TapeBackend
from graphs.wrapper import capture_graph
from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.launch import launch_paged_attention, paged_attention
from specdec.kernels.attention.launch_plan import HeadShape, QueryTile, plan_launch
from specdec.kernels.attention.path_tails import TailPrograms
from specdec.kernels.attention.query_rows import Paths
from specdec.kernels.attention.splits import num_splits
from specdec.kernels.attention.twin import paged_attention_ref
from tests.specdec.kernels.attention_cases import launches_of
from tests.specdec.kernels.tree_cases import Tree, chain, random_tree, tree_case

BORDERS = (63, 64, 65, 1023, 1024, 1025, 1152, 4096, 4352, 8191, 8192, 8193, 8704)
GROUPS = (1, 2, 4, 5, 7, 8)
FP16, BF16 = torch.float16, torch.bfloat16
# where the kernel's argument of this name is, of those after a layer's tensors
NUM_TAILS = 9
# each group compiles some nine kernels
ON_GPU = [
    *((BF16, 128, group) for group in GROUPS),
    (BF16, 64, 1),
    (BF16, 64, 7),
    (FP16, 64, 4),
    (BF16, 96, 1),
    (FP16, 96, 5),
]


@pytest.fixture
def device(exact_device):
    return exact_device


@pytest.fixture(params=["splits are shared", "one program walks all"])
def cut(request, monkeypatch):
    """Both ways to cut the keys, of trees and of plain rows."""
    if request.param != "splits are shared":
        monkeypatch.setattr(launch_plan, "FULL", 0)
        assert not plan_launch(1, 1, HeadShape(1, 1, 16, 2), has_paths=True).is_split


MOSTLY = pytest.mark.parametrize(  # the other way is slow, and other tests take it
    "cut",
    ["one program walks all", pytest.param("splits are shared", marks=pytest.mark.slow)],
    indirect=True,
)


def dtypes(device):
    return (torch.float32, FP16) if device == "cpu" else (BF16, FP16)


@MOSTLY
def test_a_chain_read_by_slots_gets_the_bits_of_a_chain_in_blocks(device, cut):
    for base, dtype in zip((5, 58, 1020, 1148), dtypes(device) * 2, strict=True):
        case = tree_case([chain(base, 8)], H=2, G=1, dtype=dtype, device=device)
        by_slots = case.attend(launch_paged_attention, case.tree)
        assert torch.equal(by_slots, case.attend(launch_paged_attention, case.chains()))
        assert not by_slots.isnan().any()


@pytest.mark.parametrize(
    "num_nodes, base",
    [
        (17, 63),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in ((20, 60), (40, 13), (20, 3), (40, 40))
        ),
    ],
)
@MOSTLY
def test_longer_paths_take_more_columns_of_a_tile(device, cut, num_nodes, base):
    """16, 32 and 64 a node, in one tile and in two."""
    case = tree_case([chain(base, num_nodes)], H=2, G=1, dtype=FP16, device=device)
    by_slots = case.attend(launch_paged_attention, case.tree)
    assert torch.equal(by_slots, case.attend(launch_paged_attention, case.plain))


def num_parts(num_rows, path_len, start):
    """Of a slot's rows: so many share the tiles of the splits that their paths reach."""
    border = next(
        b for b in itertools.count(0, 64) if b > start and num_splits(b) < num_splits(b + 1)
    )
    count = 0
    for first, end in (
        (start // 16 * 16, min(start + path_len, border)),
        (border, start + path_len),
    ):
        if first < end:
            columns = next(width for width in (16, 32, 64) if end - first <= width or width == 64)
            count += -(-num_rows // (64 // columns))
    return count


def test_there_are_programs_for_all_parts():
    heads = HeadShape(4, 8, 128, 2)
    starts = [b + i for b in (0, 64, 960, 1024, 1152, 4096, 8192) for i in range(64)]
    for path_len in (1, 2, 6, 16, 17, 18, 33, 64):
        for num_rows in (1, 3, 4, 5, 16, 17, 33):
            programs = TailPrograms.of(num_rows, path_len, heads).of_slot
            most = max(num_parts(num_rows, path_len, start) for start in starts)
            assert programs / 2 <= most <= programs, (path_len, num_rows)


def test_nodes_share_programs(exact_interpreter):
    """By themselves bits would not tell."""
    heads = HeadShape(4, 8, 128, 2)
    assert TailPrograms.of(8, 6, heads) == (4, 16, True)
    assert TailPrograms.of(8, 17, heads) == (4, 16, True)
    assert TailPrograms.of(8, 18, heads) == (16, 16, True)
    assert not TailPrograms.of(8, 6, heads._replace(C=256)).are_shared
    case = tree_case([random_tree(60, 8, 4)] * 2, H=4, G=2, dtype=FP16)
    case.attend(launch_paged_attention, case.tree)
    assert launches_of(case.tree)[0]._then[NUM_TAILS] == 2 * 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize("base", [62, 30, 1150])
def test_large_heads_have_programs_of_one_node(device, cut, base):
    tree = random_tree(base, 5, 3)
    case = tree_case([tree], H=2, G=1, C=256, dtype=torch.float32, device=device)
    by_slots = case.attend(launch_paged_attention, case.tree)
    assert torch.equal(by_slots, case.attend(launch_paged_attention, case.plain))


@pytest.mark.parametrize(
    "group, C",
    [
        (1, 16),
        *(pytest.param(group, 16, marks=pytest.mark.slow) for group in GROUPS if 1 < group < 8),
        (8, 16),
        pytest.param(2, 96, marks=pytest.mark.slow),
    ],
)
def test_each_node_gets_the_bits_of_its_path_decoded_plainly(device, group, C):
    tree = random_tree(60, 5, 4, seed=group)
    case = tree_case([tree], H=group, G=1, C=C, dtype=FP16, device=device)
    by_slots = case.attend(launch_paged_attention, case.tree)
    assert torch.equal(by_slots, case.attend(launch_paged_attention, case.plain))


@pytest.mark.parametrize("is_ragged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trees_of_several_requests_share_a_launch(device, is_ragged):
    trees = [random_tree(base, 5 + is_ragged * i, 4, i) for i, base in enumerate((0, 63, 126))]
    case = tree_case(trees, H=2, G=1, dtype=dtypes(device)[0], device=device, is_ragged=is_ragged)
    by_slots = case.attend(launch_paged_attention, case.tree)
    assert torch.equal(by_slots, case.attend(launch_paged_attention, case.plain))


@pytest.mark.slow
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("group, C", [(1, 16), (4, 64), (2, 96)])
def test_the_interpreter_gives_equal_bits_at_every_border(exact_interpreter, cut, border, group, C):
    for base in (border - 8, border - 3, border + 8):
        case = tree_case([chain(base, 9)], H=group, G=1, C=C, dtype=FP16)
        by_slots = case.attend(launch_paged_attention, case.tree)
        assert torch.equal(by_slots, case.attend(launch_paged_attention, case.chains())), base


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes, base", [(16, 1020), (33, 500), (64, 60)])
def test_the_interpreter_gives_large_trees_the_bits_of_their_paths(
    exact_interpreter, cut, num_nodes, base
):
    tree = random_tree(base, num_nodes, 8, seed=base)
    case = tree_case([tree], H=4, G=1, dtype=FP16)
    by_slots = case.attend(launch_paged_attention, case.tree)
    assert torch.equal(by_slots, case.attend(launch_paged_attention, case.plain))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, C, group", ON_GPU)
def test_a_gpu_gives_equal_bits_at_every_border(cut, dtype, C, group):
    torch.manual_seed(0)
    for border, D in product(BORDERS, (3, 8)):
        trees = [chain(border + by, D + 1) for by in range(-D, D + 1)]
        case = tree_case(trees, H=group * 2, G=2, C=C, dtype=dtype, device="cuda")
        by_slots = case.attend(launch_paged_attention, case.tree)
        for plain in (case.chains(), case.plain):
            expected = case.attend(launch_paged_attention, plain)
            assert torch.equal(by_slots, expected), (border, D)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, C, group", ON_GPU)
def test_a_gpu_gives_trees_the_bits_of_their_paths(cut, dtype, C, group):
    torch.manual_seed(0)
    for num_nodes, base in product((2, 9, 16, 32, 64), (0, 60, 300, 1020, 8190)):
        trees = [random_tree(base + i, num_nodes, 8, seed=i) for i in range(3)]
        case = tree_case(trees, H=group * 2, G=2, C=C, dtype=dtype, device="cuda")
        by_slots = case.attend(launch_paged_attention, case.tree)
        plain = case.attend(launch_paged_attention, case.plain)
        assert torch.equal(by_slots, plain), (num_nodes, base)


@pytest.mark.parametrize("tile", [QueryTile(0, 64, 4), QueryTile(0, 128, 8, skips_masks=True)])
def test_trees_keep_their_bits_in_larger_query_tiles(device, monkeypatch, tile):
    sizes = {"H": 4, "G": 1, "C": 16} if device == "cpu" else {"H": 32, "G": 8, "C": 128}
    for base in (130,) if device == "cpu" else (60, 300, 1150, 8190):
        tree = random_tree(base, 9 if device == "cpu" else 32, 8)
        case = tree_case([tree], dtype=dtypes(device)[0], device=device, **sizes)
        expected = case.attend(launch_paged_attention, case.tree)
        with monkeypatch.context() as patched:
            patched.setattr(launch_plan, "QUERY_TILES", (tile,))
            found = case.attend(launch_paged_attention, replace(case.tree))
        assert torch.equal(found, expected), base


@pytest.mark.parametrize("base", [62, pytest.param(1150, marks=pytest.mark.slow)])
@MOSTLY
def test_what_lies_in_other_nodes_slots_changes_nothing(device, cut, base):
    """Behind whole tiles of their split, too."""
    tree = random_tree(base, 7, 3, seed=3)
    case = tree_case([tree], H=4, G=2, dtype=FP16, device=device)
    clean = case.attend(launch_paged_attention, case.tree)
    for node in (0, 3, 6):
        others = [i for i in range(7) if i not in tree.path(node)]
        slots = case.node_slots[others]
        poisoned = case.cache.clone()
        poisoned[:, slots // 64, :, slots % 64] = torch.nan
        out = replace(case, cache=poisoned).attend(launch_paged_attention, case.tree)
        assert torch.equal(out[node], clean[node])
        assert out[others[-1]].isnan().any()  # whose own key is poisoned


@pytest.mark.parametrize("how", [launch_paged_attention, paged_attention_ref])
def test_padding_changes_no_row(device, cut, how):
    """Rows at the end of a slot, a whole slot, and garbage in what padding names."""
    case = tree_case([random_tree(70, 5, 3), Tree(base=70, parents=[-1] * 5)], device=device)
    clean = case.attend(how, case.tree)[:3]
    rows = replace(
        case.tree,
        positions=case.tree.positions.index_fill(0, torch.arange(3, 10, device=device), 0),
        idx_mapping=torch.tensor([0, -1], device=device),
        paths=Paths(
            slots=case.tree.paths.slots.index_fill(0, torch.arange(3, 10, device=device), -1),
            starts=torch.tensor([70, 0], device=device),
        ),
    )
    padded = replace(case, q=case.q.index_fill(0, torch.arange(3, 10, device=device), torch.nan))
    assert torch.equal(padded.attend(how, rows)[:3], clean)


@pytest.mark.parametrize("num_nodes", [5, pytest.param(17, marks=pytest.mark.slow)])
def test_a_tile_of_padding_is_a_number_whatever_the_workspace_held(device, cut, num_nodes):
    """The paths begin inside a split, which a tile of rows at position 0 does not reach."""
    case = tree_case([chain(1100, num_nodes)], H=4, G=1, dtype=FP16, device=device)
    T, H, C = case.q.shape
    rows = replace(
        case.tree,
        positions=case.tree.positions.index_fill(0, torch.tensor([T - 1], device=device), 0),
        workspace=torch.full((T * H * num_splits(1200) * (C + 2),), torch.nan, device=device),
    )
    assert case.attend(launch_paged_attention, rows).isfinite().all()


def test_a_row_behind_its_path_is_a_number_where_one_program_walks_all(device, monkeypatch):
    """It has no keys of its own, and leaves results all the same."""
    monkeypatch.setattr(launch_plan, "FULL", 0)
    case = tree_case([chain(1140, 5)], H=2, G=1, dtype=FP16, device=device)
    T, H, C = case.q.shape
    rows = replace(
        case.tree,
        positions=case.tree.positions.index_fill(0, torch.tensor([T - 1], device=device), 1160),
        workspace=torch.full((T * H * 3 * (C + 2),), torch.nan, device=device),
    )
    assert case.attend(launch_paged_attention, rows).isfinite().all()


@MOSTLY
def test_what_was_added_up_may_be_forgotten(cut, forget):
    """Each partial result is read once; the next layer writes it again."""
    trees = [random_tree(1100, 4, 2), random_tree(70, 4, 2, seed=1)]
    case = tree_case(trees, H=2, G=1, C=96, dtype=FP16)
    size = len(case.q) * 2 * num_splits(case.tree.max_seq_len) * (96 + 2)
    rows = replace(case.tree, workspace=torch.full((size,), torch.nan))
    expected = case.attend(launch_paged_attention, rows)
    assert expected.isfinite().all()
    held = rows.workspace.isfinite().sum()
    forget()
    rows = replace(rows)
    for _ in range(2):
        assert torch.equal(case.attend(launch_paged_attention, rows), expected)
    assert rows.workspace.isfinite().sum() < held // 10


def apart(rows):
    """A launch of the programs for the last keys of paths, and one of the others."""
    both = launches_of(rows)[0]
    num_tails = both._then[NUM_TAILS]
    tails, rest = copy.copy(both), copy.copy(both)
    tails._grid = num_tails, 1, 1
    rest._grid = both._grid[0] - num_tails, 1, 1
    rest._then = *both._then[:NUM_TAILS], 0, *both._then[NUM_TAILS + 1 :]
    for each in (tails, rest):
        each._found = None
    return tails, rest


@pytest.mark.parametrize(
    "base, most_nodes", [pytest.param(125, 17, marks=pytest.mark.slow), (1150, 5)]
)
def test_programs_beside_each_other_write_different_results(device, cut, base, most_nodes):
    """Behind 1,024 keys those for paths also take shared tiles of the split where they begin."""
    for num_nodes in {5, most_nodes}:
        case = tree_case([chain(base, num_nodes)], H=4, G=1, dtype=FP16, device=device)
        T, H, C = case.q.shape
        is_split = plan_launch(1, num_nodes, HeadShape(4, 1, C, 2), has_paths=True).is_split
        num_parts = num_splits(1280) if is_split else 3
        workspace = torch.zeros(T * H * num_parts * (C + 2), device=device)
        rows = replace(case.tree, max_seq_len=1280, workspace=workspace)
        case.attend(launch_paged_attention, rows)
        written = []
        for launch in apart(rows):
            workspace.fill_(torch.nan)
            launch(case.q.clone(), case.q, *case.cache.unbind(), None)
            acc = workspace[: T * H * num_parts * C].view(T, H, num_parts, C)
            written.append(~acc.isnan().all(dim=-1))
        tails, walk = written
        assert walk.any()
        assert tails.any()
        assert not (walk & tails).any()


def test_a_slot_at_the_end_of_the_context_writes_into_no_other(device, cut):
    """Its rows are padding; for the split in which paths would begin there is no partial result."""
    case = tree_case([Tree(base=1024, parents=[-1] * 3), random_tree(70, 3, 2)], device=device)
    T, H, C = case.q.shape
    is_split = plan_launch(2, 3, HeadShape(2, 2, C, 4), has_paths=True).is_split
    num_parts = num_splits(1024) if is_split else 3
    rows = replace(
        case.tree,
        max_seq_len=1024,
        positions=case.tree.positions.index_fill(0, torch.arange(3, device=device), 0),
        workspace=torch.zeros(T * H * num_parts * (C + 2), device=device),
    )
    case.attend(launch_paged_attention, rows)
    rows.workspace.fill_(torch.nan)
    tails, _ = apart(rows)
    tails(case.q.clone(), case.q, *case.cache.unbind(), None)
    acc = rows.workspace[: T * H * num_parts * C].view(T, H, num_parts, C)
    assert acc[3, :, 0].isnan().all()  # the walk's, of the next slot
    assert acc[3:, :, 1].isfinite().all()


def test_the_kernel_is_its_twin(device):
    for dtype in dtypes(device):
        case = tree_case(
            [random_tree(61, 9, 5), random_tree(120, 9, 9)], dtype=dtype, device=device
        )
        actual = case.attend(launch_paged_attention, case.tree)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        expected = case.attend(paged_attention_ref, case.tree)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "group, C",
    [
        *((1, 64), (4, 16), (7, 128), (2, 96)),
        *(pytest.param(group, 64, marks=pytest.mark.slow) for group in (5, 8)),
    ],
)
def test_the_twin_gives_each_node_the_bits_of_its_path(group, C):
    torch.manual_seed(0)
    bases = (0, 63, 300, 1020)
    trees = [random_tree(base, 4 + 7 * i, 9, i) for i, base in enumerate(bases)]
    for dtype in (torch.float32, BF16):
        case = tree_case(trees, H=2 * group, G=2, C=C, dtype=dtype, is_ragged=True)
        by_slots = case.attend(paged_attention_ref, case.tree)
        assert torch.equal(by_slots, case.attend(paged_attention_ref, case.plain))
        long = replace(case.tree, max_seq_len=case.tree.block_table.shape[1] * 64)
        assert torch.equal(by_slots, case.attend(paged_attention_ref, long))


def test_the_twin_goes_on_over_more_than_two_tiles():
    torch.manual_seed(0)
    case = tree_case([chain(60, 140)])
    by_slots = case.attend(paged_attention_ref, case.tree)
    assert torch.equal(by_slots, case.attend(paged_attention_ref, case.chains()))


@pytest.mark.parametrize("backend", ["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.inference_mode()
def test_a_captured_pass_follows_other_trees(backend):
    torch.manual_seed(0)
    device = "cpu" if backend == "tape" else "cuda"
    first, second = (
        tree_case([random_tree(base, 12, 6, base)] * 2, dtype=torch.float32, device=device)
        for base in (67, 115)
    )
    rows = replace(first.tree, max_seq_len=192)
    out = torch.zeros_like(first.q)
    pool = (TapeBackend() if backend == "tape" else CudaBackend(torch.device("cuda"))).new_pool()
    paged_attention(first.q, out, first.cache, rows)  # compiles
    graph, _ = capture_graph(
        pool, BatchDescriptor(24), lambda: paged_attention(first.q, out, first.cache, rows)
    )
    for name in ("block_table", "positions"):
        getattr(rows, name).copy_(getattr(second.tree, name))
    rows.paths.starts.copy_(second.tree.paths.starts)
    rows.paths.slots[:, : second.tree.paths.slots.shape[1]].copy_(second.tree.paths.slots)
    first.cache.copy_(second.cache)
    first.q.copy_(second.q)
    graph.replay()
    assert torch.equal(out, second.attend(paged_attention, second.tree))


def test_rows_without_paths_are_cut_as_ever():
    heads = HeadShape(4, 8, 128, 2)
    assert not plan_launch(1, 40, heads).is_split
    assert plan_launch(1, 40, heads, has_paths=True).is_split
