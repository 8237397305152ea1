"""Windows of keys and sinks of heads: plain softmax, and a row's bits are the same every way."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from specdec.kernels.attention import combine, launch_plan
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.launch_plan import (
    HeadShape,
    QueryTile,
    Teams,
    plan_launch,
)
from specdec.kernels.attention.query_rows import Paths, QueryRows
from specdec.kernels.attention.twin import paged_attention_ref
from tests.specdec.kernels.attention_cases import BF16, FP16, FP32, S, case, output
from tests.specdec.kernels.tree_cases import chain, random_tree, tree_case

WINDOWS = (1, 63, 64, 65, 128, 1000, 1024)
NEVER, ALWAYS = 0, 1 << 30  # FULL: whether programs share the splits of a query tile


@pytest.fixture(autouse=True)
def few_teams(monkeypatch):
    """So that the interpreter is quick."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(launch_plan, "TEAMS", (Teams(32, 7, 4, 2), Teams(0, 7, 4, 2)))
        monkeypatch.setattr(launch_plan, "MIN_TEAMED_SLOTS", 4)


def sinks_of(q: Tensor, spread: float = 1.5) -> Tensor:
    return torch.randn(q.shape[1], device=q.device) * spread


def softmax(q: Tensor, cache: Tensor, rows: QueryRows, window: int | None, sinks: Tensor | None):
    """Attention by its formula, in float64, a row at a time."""
    _, _, G, _, C = cache.shape
    starts = rows.query_start_loc
    if starts is None:
        slots = torch.arange(len(q)) // rows.max_query_len
    else:
        slots = torch.searchsorted(starts.cpu(), torch.arange(len(q)), right=True) - 1
    out = torch.zeros(q.shape, dtype=torch.float64)
    cache = cache.cpu().double()
    for t, p in enumerate(rows.positions.tolist()):
        keys = torch.arange(0 if window is None else max(p - window + 1, 0), p + 1)
        blocks = rows.block_table[rows.idx_mapping[slots[t]]].cpu()[keys // S]
        k, v = cache[:, blocks, :, keys % S].unbind(1)  # [keys, G, C] each
        heads = torch.arange(q.shape[1]) // (q.shape[1] // G)
        scores = torch.einsum("hc,khc->hk", q[t].cpu().double(), k[:, heads]) * C**-0.5
        if sinks is not None:
            scores = torch.cat([scores, sinks.cpu().double()[:, None]], 1)
        weights = scores.softmax(1)[:, : len(keys)]
        out[t] = torch.einsum("hk,khc->hc", weights, v[:, heads])
    return out


def attend(q, cache, rows: QueryRows, window, sinks, how=launch_paged_attention) -> Tensor:
    return output(partial(how, window=window, sinks_H=sinks), q, cache, replace(rows))


def each_way(monkeypatch, q, cache, rows: QueryRows, window, sinks) -> Iterator[tuple]:
    """What every kernel makes of these rows."""
    for full in (NEVER, ALWAYS):
        for tile in (QueryTile(0, 16, 2), QueryTile(0, 64, 4, True)):
            with monkeypatch.context() as patched:
                patched.setattr(launch_plan, "FULL", full)
                patched.setattr(launch_plan, "FEW_KEYS", 0)
                patched.setattr(launch_plan, "QUERY_TILES", (tile,))
                yield (full, tile), attend(q, cache, rows, window, sinks)


def with_rows(rows: QueryRows, positions_BQ: Tensor) -> QueryRows:
    """Rows of the first request, as of several."""
    B, Q = positions_BQ.shape
    idx = torch.zeros(B, dtype=torch.int64)
    positions = positions_BQ.flatten()
    return replace(rows, idx_mapping=idx, positions=positions, max_query_len=Q)


def poisoned(cache: Tensor, rows: QueryRows, window: int) -> Tensor:
    """Tiles that no row of a request sees are NaN; of others, keys before all rows' are large."""
    cache = cache.clone()
    Q = rows.max_query_len
    for b, first in enumerate(rows.positions[::Q].tolist()):
        seen = max(first - window + 1, 0)
        blocks = rows.block_table[b]
        cache[:, blocks[: seen // S]] = torch.nan
        if seen % S:
            cache[:, blocks[seen // S], :, : seen % S] = 1e4
    return cache


SLOW = pytest.mark.slow


def slow_but(first, *others):
    """Parameters of which the default suite takes the first."""
    values = (each if isinstance(each, tuple) else (each,) for each in others)
    return [first, *(pytest.param(*each, marks=SLOW) for each in values)]


@pytest.mark.parametrize("has_sinks", slow_but(True, False))
@pytest.mark.parametrize("window", [None, 24, *(pytest.param(w, marks=SLOW) for w in (1, 64, 65))])
@pytest.mark.parametrize("how", [launch_paged_attention, paged_attention_ref])
def test_rows_get_the_softmax_of_their_window(exact_interpreter, how, window, has_sinks):
    extents = (64, 130, 24, 25), (3, 3, 3, 3)
    q, cache, rows = case("normal", extents, group=2, G=1, C=16, dtype=FP32, device="cpu")
    sinks = sinks_of(q) if has_sinks else None
    found = attend(q, cache, rows, window, sinks, how).double()
    torch.testing.assert_close(found, softmax(q, cache, rows, window, sinks), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", slow_but(65, 1, 63, 64, 128))
def test_a_row_has_the_same_bits_every_way(exact_interpreter, monkeypatch, window):
    """In rounds of several requests, or of one, and in a chunk."""
    how = {"group": 2, "G": 1, "C": 16, "dtype": FP16, "device": "cpu"}
    q, cache, rows = case("normal", ((150,), (90,)), **how)
    sinks = sinks_of(q)
    expected = attend(q, cache, rows, window, sinks)
    assert expected.isfinite().all()
    several = [[end - 2, end - 1, end] for end in (window, window + 1, 128) if 62 <= end < 150]
    for positions in map(torch.tensor, (several, [[145, 146, 147, 148, 149]])):
        some = with_rows(rows, positions)
        own = some.positions - 60
        for way, found in each_way(monkeypatch, q[own], cache, some, window, sinks):
            assert torch.equal(found, expected[own]), (positions.shape, way)


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
def test_far_rows_have_the_same_bits_every_way(exact_interpreter, monkeypatch, window):
    """At borders of tiles and splits, of which there are longer and longer ones."""
    how = {"group": 1, "G": 1, "C": 16, "dtype": FP32, "device": "cpu"}
    for place in (window, 1023, 1024, 1152, 4096, 4352, 8192, 8704, 32767):
        length = min(place + 2, 32768)
        q, cache, rows = case(
            "normal", ((length, length - 1), (3, 3) if length > 4 else (1, 1)), **how
        )
        sinks = sinks_of(q)
        expected = softmax(q, cache, rows, window, sinks)
        found = attend(q, cache, rows, window, sinks)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-6)
        by_twin = attend(q, cache, rows, window, sinks, paged_attention_ref)
        torch.testing.assert_close(by_twin.double(), expected, rtol=0, atol=3e-6)
        for way, other in each_way(monkeypatch, q, cache, rows, window, sinks):
            assert torch.equal(other, found), (place, way)


@pytest.mark.parametrize("window", slow_but(24, 1, 70))
@pytest.mark.parametrize("how", [launch_paged_attention, paged_attention_ref])
def test_keys_before_the_window_change_nothing(exact_interpreter, monkeypatch, how, window):
    """A weight of 0 does not silence a NaN, so tiles that no row sees are not even read."""
    q, cache, rows = case(
        "normal", ((88, 200, 150), (3, 3, 3)), group=2, G=1, C=16, dtype=FP32, device="cpu"
    )
    expected = attend(q, cache, rows, window, None, how)
    other = poisoned(cache, rows, window)
    assert torch.equal(attend(q, other, rows, window, None, how), expected)
    if how is launch_paged_attention:
        for way, found in each_way(monkeypatch, q, other, rows, window, None):
            assert torch.equal(found, expected), way


def test_long_slots_begin_with_their_sinks(exact_interpreter, monkeypatch):
    """Whether teams share their splits or not, beside walks of other slots."""
    monkeypatch.setattr(launch_plan, "ALONE_KEYS", 128)
    monkeypatch.setattr(launch_plan, "LONG_TEAMS", (Teams(32, 3, 4, 2), Teams(0, 3, 4, 2)))
    monkeypatch.setattr(launch_plan, "MIN_SLOTS", 4)
    monkeypatch.setattr(combine, "COMBINERS", 3)
    extents = (129, 10, 200), (1, 1, 1)
    q, cache, rows = case("normal", extents, group=2, G=1, C=16, dtype=FP16, device="cpu")
    sinks = sinks_of(q)
    expected = dict(each_way(monkeypatch, q, cache, rows, None, sinks))
    monkeypatch.setattr(launch_plan, "FULL", 3)
    found = attend(q, cache, rows, None, sinks)
    assert all(torch.equal(found, each) for each in expected.values())
    given = plan_launch(3, 1, HeadShape(2, 1, 16, 2), most_keys=200)
    assert given.is_helped


@pytest.mark.parametrize("full", [NEVER, ALWAYS])
@pytest.mark.parametrize("lengths", [(300,), (200, 300)])
@pytest.mark.parametrize("how", [launch_paged_attention, paged_attention_ref])
def test_padding_after_a_slots_rows_is_a_number(exact_interpreter, monkeypatch, how, lengths, full):
    """At position 0, whose keys no row of the slot sees; and changes no other row."""
    monkeypatch.setattr(launch_plan, "FULL", full)
    monkeypatch.setattr(launch_plan, "FEW_KEYS", 0)
    extents = lengths, (4,) * len(lengths)
    q, cache, rows = case("normal", extents, group=2, G=1, C=16, dtype=FP32, device="cpu")
    rows = replace(rows, workspace=torch.full((8 * 2 * 8 * 18,), torch.nan))
    expected = attend(q, cache, rows, 24, None, how)
    padded = replace(rows, positions=rows.positions.index_fill(0, torch.tensor([2, 3]), 0))
    found = attend(q, poisoned(cache, rows, 24), padded, 24, None, how)
    assert found.isfinite().all()
    others = [t for t in range(len(q)) if t not in (2, 3)]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("full", [NEVER, ALWAYS])
@pytest.mark.parametrize("base, window", slow_but((1100, 10), (1100, 100), (20, 3)))
def test_padding_after_a_trees_rows_is_a_number(exact_interpreter, monkeypatch, base, window, full):
    """Where there are splits of shared keys, none in the window, and none at all."""
    monkeypatch.setattr(launch_plan, "FULL", full)
    monkeypatch.setattr(launch_plan, "FEW_KEYS", 0)
    monkeypatch.setattr(launch_plan, "PATH_SHARERS", 4)
    case = tree_case([random_tree(base, 5, 3)], H=2, G=1, dtype=FP32)
    last = torch.tensor([3, 4])
    paths = replace(case.tree.paths, slots=case.tree.paths.slots.index_fill(0, last, -1))
    rows = replace(
        case.tree,
        paths=paths,
        positions=case.tree.positions.index_fill(0, last, 0),
        workspace=torch.full((5 * 2 * 32 * 18,), torch.nan),
    )
    how = partial(launch_paged_attention, window=window)
    found = case.attend(how, rows)
    assert found.isfinite().all()
    assert torch.equal(found[:3], case.attend(how, case.tree)[:3])


TREES = (62, 3), (126, 40), (60, 1), (66, 4), (70, 20), (70, 64), (126, 70), (126, 128), (1150, 100)


@pytest.mark.parametrize("full", [NEVER, ALWAYS])
@pytest.mark.parametrize("has_sinks", slow_but(True, False))
@pytest.mark.parametrize("base, window", [TREES[0], *slow_but(*TREES[1:])])
def test_trees_get_the_bits_of_their_paths(
    exact_interpreter, monkeypatch, full, has_sinks, base, window
):
    """The window begins before, in and after the shared keys of the split where paths begin."""
    monkeypatch.setattr(launch_plan, "FULL", full)
    monkeypatch.setattr(launch_plan, "FEW_KEYS", 0)
    case = tree_case([random_tree(base, 5, 4, seed=base)], H=2, G=1, dtype=FP16)
    sinks = sinks_of(case.q) if has_sinks else None
    how = partial(launch_paged_attention, window=window, sinks_H=sinks)
    by_slots = case.attend(how, case.tree)
    assert torch.equal(by_slots, case.attend(how, case.plain))
    twin = partial(paged_attention_ref, window=window, sinks_H=sinks)
    by_twin = case.attend(twin, case.tree)
    assert torch.equal(by_twin, case.attend(twin, case.plain))
    torch.testing.assert_close(by_twin, by_slots, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("full", slow_but(ALWAYS, NEVER))
@pytest.mark.parametrize("C", slow_but(16, 256))
def test_trees_read_no_tile_before_their_windows(exact_interpreter, monkeypatch, full, C):
    monkeypatch.setattr(launch_plan, "FULL", full)
    monkeypatch.setattr(launch_plan, "FEW_KEYS", 0)
    case = tree_case([random_tree(1300, 4, 3)], H=2, G=1, C=C, dtype=FP32)
    for window in (10, 40):  # from path_start % 64 = 20 on
        for how in (launch_paged_attention, paged_attention_ref):
            how = partial(how, window=window)
            expected = case.attend(how, case.tree)
            seen = 1300 - window + 1
            blocks = case.tree.block_table[0]
            cache = case.cache.clone()
            cache[:, blocks[: seen // S]] = torch.nan
            cache[:, blocks[seen // S], :, : seen % S] = 1e4
            assert torch.equal(replace(case, cache=cache).attend(how, case.tree), expected)


@pytest.mark.parametrize("base", [60, 1084])
@pytest.mark.parametrize("how", [launch_paged_attention, paged_attention_ref])
def test_a_level_of_drafts_may_see_the_ends_of_its_paths_alone(exact_interpreter, how, base):
    """Windows begin in the tile after the one where paths do, of which nothing is read.

    That tile is in the next split, or in the same one.
    """
    case = tree_case([chain(base, 8)], H=2, G=1, dtype=FP32)
    level = torch.tensor([6, 7])  # two and three keys after a border of tiles
    paths = Paths(slots=case.tree.paths.slots[level], starts=case.tree.paths.starts)
    rows = {"positions": case.tree.positions[level], "max_query_len": 2, "tiles": None}
    tree = replace(case.tree, paths=paths, **rows)
    cache = case.cache.clone()
    cache[:, case.tree.block_table[0, : base // S + 1]] = torch.nan
    slots = case.node_slots[:4]
    cache[:, slots // S, :, slots % S] = torch.nan
    how = partial(how, window=3)
    expected = case.attend(how, case.plain)[level]
    assert torch.equal(output(how, case.q[level], cache, tree), expected)


def test_small_windows_share_no_splits_and_no_slot_is_long():
    small, large = (HeadShape(8, 8, 64, 2, window) for window in (128, 4096))
    for B in (1, 4, 64):
        plan = plan_launch(B, 4, small)
        assert (plan.is_split, plan.is_helped, plan.teams) == (False, False, 0)
        assert not plan_launch(B, 4, large).is_helped
    assert plan_launch(1, 4, large).is_split
    tree = plan_launch(1, 32, large, has_paths=True)
    assert tree.is_split
    assert not tree.is_wide


def test_a_window_of_all_keys_changes_nothing(exact_interpreter):
    q, cache, rows = case("normal", ((100,), (3,)), group=1, G=1, C=16, dtype=FP32, device="cpu")
    expected = attend(q, cache, rows, None, None)
    for window in (100, 128, 1000):
        assert torch.equal(attend(q, cache, rows, window, None), expected)


def test_layers_of_each_kind_have_kernels_of_their_own(exact_interpreter):
    q, cache, rows = case("normal", ((200,), (3,)), group=1, G=1, C=16, dtype=FP32, device="cpu")
    sinks = sinks_of(q)
    for window, given, scale in (
        (None, None, None),
        (24, None, None),
        (24, sinks, None),
        (24, sinks, 1.0),
    ):
        for _ in range(2):
            out = torch.empty_like(q)
            launch_paged_attention(q, out, cache, rows, scale, window, given)
    assert len(rows.launches) == 4


@pytest.mark.slow
def test_its_kernels_compile_without_a_gpu():
    """In a process without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_windows"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = [line.split()[-2:] for line in done.stdout.splitlines()]
    assert len(counts) == 8
    assert all(int(plain) >= int(windowed) for plain, windowed in counts)
    assert all((plain == "0") == (windowed == "0") for plain, windowed in counts)


GPU_SHAPES = [
    *((BF16, 64, 8), (BF16, 128, 4)),
    *(pytest.param(*each, marks=SLOW) for each in ((FP16, 128, 1), (BF16, 96, 2), (BF16, 256, 4))),
]
GPU_WINDOWS = (1, 64, 65, 128, 1000, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, C, group", GPU_SHAPES)
def test_a_gpu_gives_a_row_the_same_bits_every_way(monkeypatch, dtype, C, group):
    """A chunk by the prompt kernel where it fits, and by the walk; rounds by all kernels."""
    torch.manual_seed(0)
    extents = (1100, 2210, 8260, 130), (1100, 129, 600, 70)
    q, cache, rows = case("normal", extents, group=group, G=2, C=C, dtype=dtype, device="cuda")
    starts = rows.query_start_loc
    lasts = (starts[1:, None] - torch.arange(4, 0, -1, device="cuda")).flatten()
    verify = replace(rows, positions=rows.positions[lasts], query_start_loc=None, max_query_len=4)
    for window in GPU_WINDOWS:
        for sinks in (sinks_of(q), None) if (window, C) == (128, 64) else (sinks_of(q),):
            monkeypatch.setattr(launch_plan, "PROMPT_MORE_THAN", None)
            expected = attend(q, cache, rows, window, sinks)
            assert expected.isfinite().all(), window
            monkeypatch.setattr(launch_plan, "PROMPT_MORE_THAN", 0)
            assert torch.equal(attend(q, cache, rows, window, sinks), expected), window
            for way, found in each_way(monkeypatch, q[lasts], cache, verify, window, sinks):
                assert torch.equal(found, expected[lasts]), (window, way)
            near = softmax(q[lasts], cache, verify, window, sinks).to(expected)
            torch.testing.assert_close(expected[lasts], near, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, C, group", GPU_SHAPES)
@pytest.mark.parametrize("full", [NEVER, ALWAYS])
def test_a_gpu_gives_trees_the_bits_of_their_paths_in_windows(monkeypatch, full, dtype, C, group):
    torch.manual_seed(0)
    monkeypatch.setattr(launch_plan, "FULL", full)
    monkeypatch.setattr(launch_plan, "FEW_KEYS", 0)
    for base, window in (*TREES, (4090, 128), (8190, 1000)):
        trees = [random_tree(base + i, 9, 8, seed=i) for i in range(3)]
        case = tree_case(trees, H=group * 2, G=2, C=C, dtype=dtype, device="cuda")
        how = partial(launch_paged_attention, window=window, sinks_H=sinks_of(case.q))
        by_slots = case.attend(how, case.tree)
        assert torch.equal(by_slots, case.attend(how, case.plain)), (base, window)


@pytest.mark.gpu
@pytest.mark.parametrize("base", [200, 5000])
def test_a_gpu_walks_large_trees_with_sinks(base):
    """Of more query rows than walk.py has in a tile; without sinks these are walked wide."""
    torch.manual_seed(0)
    case = tree_case([random_tree(base, 32, 6)], H=32, G=8, C=128, dtype=BF16, device="cuda")
    how = partial(launch_paged_attention, sinks_H=sinks_of(case.q))
    assert torch.equal(case.attend(how, case.tree), case.attend(how, case.plain))


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 3, 64])
def test_a_gpu_reads_no_tile_before_the_windows(monkeypatch, B):
    torch.manual_seed(0)
    lengths = tuple(700 + 97 * b for b in range(B))
    for Q, window in ((1, 128), (4, 100), (4, 1000), (300, 128)):
        shape = {"group": 8, "G": 2, "C": 64, "dtype": BF16, "device": "cuda"}
        q, cache, rows = case("normal", (lengths, (Q,) * B), **shape)
        expected = attend(q, cache, rows, window, None)
        other = poisoned(cache, rows, window)
        assert torch.equal(attend(q, other, rows, window, None), expected), (Q, window)


@pytest.mark.gpu
def test_a_graph_serves_windows_at_all_positions():
    """Grids are those of the capture; where the window begins is decided on the device."""
    torch.manual_seed(0)
    for window in (128, 1000):
        shape = {"group": 8, "G": 2, "C": 64, "dtype": BF16, "device": "cuda"}
        q, cache, rows = case("normal", ((5000, 3000, 4099), (4, 4, 4)), **shape)
        sinks, out = sinks_of(q), torch.empty_like(q)
        positions = rows.positions.clone()
        launch_paged_attention(q, out, cache, rows, None, window, sinks)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_paged_attention(q, out, cache, rows, None, window, sinks)
        for back in (0, 1, 63, 64, 1000, 2990):
            rows.positions.copy_(positions - back)
            graph.replay()
            expected = attend(q, cache, rows, window, sinks)
            assert torch.equal(out, expected), (window, back)
