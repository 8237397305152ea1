"""No step needs a kind of attention that was not compiled ahead."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from specdec.kernels.attention import combine, launch, launch_plan
from specdec.kernels.attention.launch_plan import HeadShape, key_bounds, plan_launch
from specdec.kernels.attention.query_rows import Paths, QueryRows
from specdec.kernels.attention.splits import num_splits
from specdec.kernels.attention.wide_splits import WalkPrograms
from specdec.kernels.repeated import Repeated
from specdec.scheduling.work import Round
from specdec.sizes import EngineSizes, TreeShape
from specdec.start.attention_cuts import attention_cuts, shared_cuts, tree_cuts
from specdec.start.compile_ahead import ATTENTION_ROWS, forwards, tree_round

ALONE_KEYS = 4096
BUDGET = 8192  # max_num_batched_tokens


def counts(most: int) -> set[int]:
    """Every kind of launch takes a range of them that holds a power of 2, or the largest."""
    return {*(1 << i for i in range(10) if 1 << i < most), most}


OFTEN = (16,)


@pytest.mark.parametrize(
    "group, alone_keys",
    [
        *((n, ALONE_KEYS) for n in OFTEN),
        pytest.param(4, None, marks=pytest.mark.slow),
        *(
            pytest.param(n, ALONE_KEYS, marks=pytest.mark.slow)
            for n in range(1, 17)
            if n not in OFTEN
        ),
    ],
)
def test_attention_is_compiled_ahead_for_every_chunk(monkeypatch, group, alone_keys):
    monkeypatch.setattr(launch_plan, "ALONE_KEYS", alone_keys)
    missing = set()
    for G in (1, 2, 4, 8, 16, 32):
        if G * group > 128:  # query heads, more than any target has
            continue
        heads = HeadShape(group, G, 128, 2)
        for max_num_seqs in (1, 31, 40, 63, 64, 300, 1000):
            sizes = SimpleNamespace(max_num_seqs=max_num_seqs, most_keys=None)
            runner = SimpleNamespace(sizes=sizes, heads=(heads,))
            cuts = attention_cuts(runner, ATTENTION_ROWS, BUDGET)
            ahead = {
                plan_launch(count, length, heads, most_keys=longest).kind
                for length, count, longest in cuts
            }
            for length, longest in product(range(1, 70), (100, None)):
                most = min(max_num_seqs, BUDGET // length)
                plans = (plan_launch(n, length, heads, most_keys=longest) for n in counts(most))
                missing |= {plan.kind for plan in plans} - ahead
    assert not missing


@pytest.mark.parametrize(
    "group, G, max_num_seqs", [(4, 8, 256), (8, 8, 300), (5, 8, 512), (1, 2, 7)]
)
def test_attention_is_compiled_ahead_for_every_share_of_rows(group, G, max_num_seqs):
    heads = HeadShape(group, G, 128, 2)
    sizes = EngineSizes(
        max_model_len=32768,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        num_kv_blocks=1000,
        num_speculative_tokens=8,
        is_adaptive=True,
    )

    def kind(count: int, rows: int, longest: int) -> object:
        usual, Q = -(-rows // count), sizes.query_len
        return plan_launch(count, Q, heads, usual_query_len=usual, most_keys=longest).kind

    def kind_of_seeds(count: int, longest: int) -> object:
        return plan_launch(count, 1, heads, most_keys=longest).kind

    cuts = shared_cuts(SimpleNamespace(sizes=sizes, heads=(heads,)))
    ahead = {kind(*cut) for cut in cuts}
    seeds_ahead = {kind_of_seeds(count, longest) for count, _, longest in cuts}
    for count, longest in product(range(1, max_num_seqs + 1), (64, ALONE_KEYS, ALONE_KEYS + 1)):
        assert kind_of_seeds(count, longest) in seeds_ahead
        most = min(count * sizes.query_len, sizes.max_verify_rows)
        found = {kind(count, rows, longest) for rows in {count, *range(most, count, -7)}}
        assert found <= ahead, (count, longest)


@pytest.mark.parametrize("num_nodes, top_k", [(15, 4), (31, 4), (31, 8)])
@pytest.mark.parametrize("group, max_model_len", [(4, 3000), (4, 8000), (4, 17568), (16, 17568)])
def test_attention_to_trees_is_compiled_ahead(group, max_model_len, num_nodes, top_k):
    tree = TreeShape(num_levels=5, top_k=top_k, num_nodes=num_nodes)
    sizes = EngineSizes(
        max_model_len=max_model_len,
        max_num_seqs=24,
        max_num_batched_tokens=8192,
        num_kv_blocks=1000,
        num_speculative_tokens=5,
        tree=tree,
    )
    heads = HeadShape(group, 8, 128, 2)

    def kinds(count: int, longest: int) -> set[object]:
        return {
            plan_launch(count, rows, heads, has_paths=True, most_keys=longest).kind
            for rows in (num_nodes + 1, top_k)
        }

    runner = SimpleNamespace(sizes=sizes, heads=(heads,))
    cuts = attention_cuts(runner, {1, num_nodes + 1}, sizes.max_num_rows, tree)
    ahead = {kind for query_len, *cut in cuts if query_len > 1 for kind in kinds(*cut)}
    for longest in (64, launch_plan.WIDE_FROM, launch_plan.WIDE_FROM + 1, sizes.most_keys):
        if longest <= sizes.most_keys:
            assert {kind for count in range(1, 25) for kind in kinds(count, longest)} <= ahead


def test_passes_with_equally_many_splits_are_cut_in_one_way():
    """Kernels that were prepared for one serve the other: see ForwardContexts."""
    for bound in key_bounds(None)[:-1]:
        assert num_splits(bound) + 1 == num_splits(bound + 1)
    assert key_bounds(2048) == [2048]
    assert key_bounds(4096) == [3072, 4096]
    assert key_bounds(4160) == [3072, 4096, 4160]


@pytest.mark.parametrize("max_model_len", [3000, 8000, 17568])
def test_attention_to_trees_beside_chains_is_compiled_ahead(monkeypatch, max_model_len):
    """Steps run in pieces where prompts ride, whatever the contexts are at that time."""
    tree = TreeShape(num_levels=8, top_k=10, num_nodes=32)
    sizes = EngineSizes(
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        num_kv_blocks=1000,
        num_speculative_tokens=8,
        is_adaptive=True,
        tree=tree,
    )
    heads = HeadShape(8, 8, 128, 2)

    def kinds(count: int, max_seq_len: int) -> set[object]:
        passes = [(sizes.shape_of(count, is_wide=True).rows, max_seq_len)]
        passes += [(tree.top_k, min(max_seq_len + tree.num_levels, max_model_len))]
        return {
            (rows, plan_launch(count, rows, heads, has_paths=True, most_keys=keys).kind)
            for rows, keys in passes
        }

    def step_of(round: Round, computed: int, flags: object) -> SimpleNamespace:
        bound = min(computed + sizes.path_len, max_model_len)
        return SimpleNamespace(count=len(round.state_rows), longest=bound)

    runner = SimpleNamespace(sizes=sizes, heads=(heads,), step_of=step_of)
    steps = [tree_round(runner, count, longest=keys) for count, keys in tree_cuts(runner)]
    ahead = {kind for step in steps for kind in kinds(step.count, step.longest)}
    for count in range(1, sizes.max_tree_requests + 1):
        for longest in (64, 3000, 3064, 3072, 3073, 4096, 4097, max_model_len):
            if longest <= max_model_len:
                assert kinds(count, longest) <= ahead, (count, longest)


BLOCKS = [(8, 4, 4), (16, 2, 2), (4, 7, 8)]
AFTER_SEEDS = [(8, 5, 4), (16, 3, 2), (4, 9, 8)]


@pytest.mark.parametrize(
    "group, K, block_rows, is_adaptive, has_trees",
    [
        *((*each, adapts, False) for each in (*BLOCKS, *AFTER_SEEDS) for adapts in (False, True)),
        (4, 12, 12, True, True),
    ],
)
def test_attention_of_blocks_is_compiled_ahead(group, K, block_rows, is_adaptive, has_trees):
    """A block may have one row less than its request verifies, half as many, or a tree's levels."""
    tree = None
    if has_trees:
        tree = TreeShape(num_levels=K, top_k=4, num_nodes=K + 2, smaller=((3, 2, K + 1),))
    sizes = EngineSizes(
        max_model_len=17568,
        max_num_seqs=40,
        max_num_batched_tokens=8192,
        num_kv_blocks=1000,
        num_speculative_tokens=K,
        is_adaptive=is_adaptive,
        block_rows=block_rows,
        tree=tree,
    )
    heads = HeadShape(group, 8, 128, 2)

    def kind(count: int, max_seq_len: int, levels: int) -> object:
        rows = levels + block_rows - K
        keys = min(max_seq_len + rows, sizes.max_model_len)
        # a tree's block may take the kernels of a chain's
        return has_trees or levels, plan_launch(count, rows, heads, most_keys=keys).kind

    ahead = set()

    def step_of(round: Round, computed: int, flags: object) -> None:
        drafts = round.next_shape
        if round.state_rows and not round.parts and drafts.nodes and not drafts.is_wide:
            most = sizes.path_len if round.shape.nodes else 1
            bound = min(computed + most, sizes.max_model_len)
            ahead.add(kind(len(round.state_rows), bound, round.next_shape.levels))

    graphs = SimpleNamespace(shapes=())
    list(forwards(SimpleNamespace(sizes=sizes, heads=(heads,), step_of=step_of, graphs=graphs)))
    for count in range(1, sizes.max_num_seqs + 1):
        for longest in (64, 3072 - block_rows, 3072, 4096 - block_rows, 4096, 17568):
            for levels in {K, (K + 1) // 2 if is_adaptive else K, 2 if has_trees else K}:
                assert kind(count, longest, levels) in ahead, (count, longest, levels)


@pytest.mark.parametrize("has_wgmma", [False, True])
@pytest.mark.parametrize("has_paths", [False, True])
@pytest.mark.parametrize(
    "group, G, C, window",
    [(4, 8, 128, None), (2, 2, 64, None), (1, 1, 32, None), (8, 8, 64, 128), (4, 8, 128, 4096)],
)
def test_launches_of_one_kind_take_the_same_kernels(
    monkeypatch, has_paths, group, G, C, window, has_wgmma
):
    """Else one that was compiled ahead would not serve for all of them."""
    monkeypatch.setattr(launch, "is_hopper", lambda device: has_wgmma)
    monkeypatch.setattr(launch, "WideWalk", lambda *_: taken.append("wide"))
    monkeypatch.setattr(combine, "walk_programs", lambda given: WalkPrograms(4, 4))
    compiled = {}
    real = Repeated.__init__

    def spy(self, kernel, grid, **given):
        taken.append((kernel, given["constants"], given["options"]))
        real(self, kernel, grid, **given)

    monkeypatch.setattr(Repeated, "__init__", spy)
    heads = HeadShape(group, G, C, 2, window)
    cache = torch.zeros(2, 2, G, 64, C, dtype=torch.bfloat16)
    lengths = (3000, 200 * 64) if has_paths else (200 * 64,)
    counts, all_rows = (1, 2, 3, 5, 8, 9, 16, 17, 33, 64), (1, 2, 4, 6, 8, 16, 20)
    for B, Q, longest in product(counts, all_rows, lengths):
        taken = []
        table = torch.zeros(B + 1, -(-longest // 64), dtype=torch.int64)
        paths = Paths(slots=torch.zeros(B * Q, 4, dtype=torch.int64), starts=table[:B, 0])
        rows = QueryRows(
            block_table=table,
            idx_mapping=torch.arange(B),
            positions=torch.zeros(B * Q, dtype=torch.int64),
            max_query_len=Q,
            max_seq_len=longest,
            paths=paths if has_paths else None,
        )
        q = torch.zeros(B * Q, group * G, C, dtype=torch.bfloat16)
        launch._prepare(q, cache, rows, None, window, False)
        kind = plan_launch(B, Q, heads, has_paths=has_paths, most_keys=longest).kind
        assert compiled.setdefault(kind, taken) == taken, (B, Q, longest)
    assert len(compiled) > 1
    has_wide = any("wide" in kernels for kernels in compiled.values())
    assert has_wide == (has_paths and has_wgmma and (group, C, window) == (4, 128, None))
