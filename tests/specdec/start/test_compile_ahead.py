"""The steps that are compiled ahead cover every kind of row count that an engine may have."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from specdec import LLM
from specdec.kernels.attention import launch_plan
from specdec.kernels.attention.launch_plan import HeadShape
from specdec.kernels.experts.tiles import class_of
from specdec.kernels.tile_shapes import row_class
from specdec.passes.captured import shared_shapes
from specdec.requests.params import GREEDY
from specdec.rounds.logprobs import ROWS_AT_ONCE
from specdec.scheduling.work import PromptPart
from specdec.sizes import PLAIN, EngineSizes, TreeShape, chain
from specdec.start.compile_ahead import (
    DRAWN,
    FLAGS,
    LOGPROB_ROWS,
    block_rounds,
    forwards,
    mixed_steps,
    request_counts,
    samplings,
    shared_rounds,
)
from tests.shared_rows import rows_are_shared


def kind(rows: int) -> tuple[int, int]:
    """What a kernel is compiled for: tiles, and what Triton knows of the number."""
    return row_class(rows), 1 if rows == 1 else 16 if rows % 16 == 0 else 0


@pytest.mark.parametrize("max_num_seqs", [1, 3, 40, 64, 300])
@pytest.mark.parametrize("query_len", [1, 2, 4, 6, 33])
def test_each_kind_of_row_count_is_compiled_ahead(max_num_seqs, query_len):
    sizes = SimpleNamespace(
        max_num_seqs=max_num_seqs, is_adaptive=False, tree=None, block_rows=0, has_seeds=False
    )
    counts = list(request_counts(SimpleNamespace(sizes=sizes), query_len))
    assert max(counts) <= max_num_seqs
    every = {kind(count * query_len) for count in range(1, max_num_seqs + 1)}
    assert {kind(count * query_len) for count in counts} == every
    assert max_num_seqs in counts
    if query_len > 1:  # K drafts, of blocks of as many rows or one more
        sizes.block_rows = query_len
        counts = list(request_counts(SimpleNamespace(sizes=sizes), query_len))
        for rows in (query_len - 1, query_len):
            every = {kind(count * rows) for count in range(1, max_num_seqs + 1)}
            assert {kind(count * rows) for count in counts} >= every
        if query_len > 2:  # after seeds there are masks for all drafts but one
            after_seeds = SimpleNamespace(**vars(sizes) | {"has_seeds": True})
            counts = list(request_counts(SimpleNamespace(sizes=after_seeds), query_len))
            every = {kind(count * (query_len - 2)) for count in range(1, max_num_seqs + 1)}
            assert {kind(count * (query_len - 2)) for count in counts} >= every
        sizes.tree = TreeShape(num_levels=3, top_k=5, num_nodes=query_len - 1)
        counts = list(request_counts(SimpleNamespace(sizes=sizes), query_len))
        for rows in (3, 4, 5, query_len):
            every = {kind(count * rows) for count in range(1, max_num_seqs + 1)}
            assert {kind(count * rows) for count in counts} >= every


@pytest.fixture
def chunks():
    """chunks(...): the chunks that are compiled ahead for an engine of these sizes.

    extending: those alone after which nothing is drafted, though there is a draft
    """

    def of(
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        K: int,
        is_adaptive: bool = False,
        extending: bool = False,
    ):
        sizes = EngineSizes(
            is_adaptive=is_adaptive,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            num_kv_blocks=1,
            num_speculative_tokens=K,
        )
        found: list[list[PromptPart]] = []

        def step_of(round, *_):
            if round.parts and (round.next_shape == PLAIN or not extending):
                found.append(round.parts)

        runner = SimpleNamespace(
            sizes=sizes,
            graphs=SimpleNamespace(shapes=()),
            heads=(HeadShape(4, 8, 128, 2),),
            step_of=step_of,
        )
        list(forwards(runner))
        return found

    return of


@pytest.mark.parametrize(
    "max_model_len, budget, max_num_seqs, K",
    [(4096, 8192, 64, 3), (1500, 8192, 40, 3), (512, 64, 40, 3), (128, 8192, 4, 0), (2, 8, 1, 1)],
)
def test_each_kind_of_forward_is_compiled_ahead(chunks, max_model_len, budget, max_num_seqs, K):
    found = chunks(max_model_len, budget, max_num_seqs, K)
    assert max(part.length for parts in found for part in parts) < max_model_len
    assert max(map(len, found)) <= max_num_seqs
    most = min(budget + max_num_seqs * (K + 1), max_num_seqs * (max_model_len - 1))
    every = {kind(rows) for rows in range(1, most + 1)}
    rows = [sum(part.length for part in parts) for parts in found]
    assert {*map(kind, rows)} == every
    assert {*map(class_of, rows)} == {class_of(n) for n in range(1, most + 1)}


@pytest.mark.parametrize("max_model_len, longest", [(4096, 1025), (512, 511)])
def test_the_kernel_of_prompts_is_compiled_ahead(chunks, monkeypatch, max_model_len, longest):
    """With as many query rows as it needs at one query head, or as many as a step may have."""
    monkeypatch.setattr(launch_plan, "PROMPT_MORE_THAN", None)
    without = chunks(max_model_len, 8192, 1, 0)
    monkeypatch.setattr(launch_plan, "PROMPT_MORE_THAN", 1024)
    found = chunks(max_model_len, 8192, 1, 0)
    assert len(found) == len(without) + 1
    assert [part.length for part in found[-1]] == [longest]


def test_a_draft_whose_cache_is_extended_alone_is_compiled_ahead(chunks):
    """Any number of rows where plain rounds may pay, else parts that fill a step."""
    sizes = {"max_model_len": 4096, "max_num_batched_tokens": 1024, "max_num_seqs": 4}

    def rows(**of_draft) -> list[int]:
        found = chunks(**sizes, **of_draft, extending=True)
        return [sum(part.length for part in parts) for parts in found]

    assert rows(K=3) == [1024]
    most = 1024 + 4 * 4
    assert {*map(kind, rows(K=3, is_adaptive=True))} == {*map(kind, range(1, most + 1))}


def test_each_kind_of_prompt_rows_with_logprobs_is_compiled_ahead():
    every = {kind(rows) for rows in range(1, ROWS_AT_ONCE + 1)}
    assert {kind(rows) for rows in LOGPROB_ROWS} == every


@pytest.mark.parametrize("max_num_seqs", [1, 9, 64, 256])
def test_rounds_whose_rows_are_shared_out_are_compiled_ahead(max_num_seqs):
    sizes = EngineSizes(
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=max_num_seqs,
        num_kv_blocks=1,
        num_speculative_tokens=8,
        is_adaptive=True,
    )
    shapes = shared_shapes(sizes)
    steps = []
    runner = SimpleNamespace(
        sizes=sizes,
        graphs=SimpleNamespace(shapes=shapes),
        step_of=lambda round, *_: steps.append(
            (round.num_verified, round.shared_rows, round.next_shape.levels)
        ),
    )
    list(shared_rounds(runner))
    assert {rows for _, rows in shapes} == {rows for _, rows, _ in steps if rows}
    widest = {(min(B, rows), rows) for B, rows in shapes if max_num_seqs == B}
    assert widest <= {each[:2] for each in steps}
    assert (1, 0, 0) in steps
    assert len(shapes) <= 64


@pytest.mark.parametrize("block_rows, has_trees", [(6, False), (7, False), (8, False), (8, True)])
def test_blocks_whose_length_varies_are_compiled_ahead(block_rows, has_trees):
    sizes = EngineSizes(
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=40,
        num_kv_blocks=1,
        num_speculative_tokens=7,
        is_adaptive=True,
        block_rows=block_rows,
        tree=TreeShape(num_levels=7, top_k=5, num_nodes=9) if has_trees else None,
    )
    steps = []
    step_of = lambda round, *_: steps.append((round.next_shape.levels, round.num_verified))  # noqa: E731
    runner = SimpleNamespace(sizes=sizes, step_of=step_of)
    list(block_rounds(runner, GREEDY))
    assert {levels for levels, _ in steps} == {4, 7}
    for levels in (4, 7):
        # those of a block, and those that propose: after seeds both are one fewer
        for rows in (min(levels, levels + block_rows - 7), levels + block_rows - 7):
            found = {kind(count * rows) for each, count in steps if each == levels}
            assert found >= {kind(count * rows) for count in range(1, 41)}


def test_after_seeds_one_draft_needs_no_block():
    sizes = EngineSizes(
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=40,
        num_kv_blocks=1,
        num_speculative_tokens=2,
        is_adaptive=True,
        block_rows=1,
    )
    assert (sizes.chain_lengths, sizes.block_lengths) == ((1, 2), (2,))
    steps = []
    runner = SimpleNamespace(sizes=sizes, step_of=lambda round, *_: steps.append(round))
    list(block_rounds(runner, GREEDY))
    assert {step.next_shape for step in steps} == {chain(2)}


def test_shapes_hold_every_round_that_may_be_asked_for():
    sizes = EngineSizes(
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=100,
        num_kv_blocks=1,
        num_speculative_tokens=8,
        is_adaptive=True,
    )
    shapes = shared_shapes(sizes)
    assert list(shapes) == sorted(shapes, key=lambda shape: (shape[1], shape[0]))
    assert max(rows for _, rows in shapes) == sizes.max_verify_rows == 512
    for count in range(1, 101):
        rows = [n for B, n in shapes if count <= B]
        assert min(rows) >= count
        assert max(rows) >= min(9 * count, 512)
    assert shared_shapes(replace(sizes, is_adaptive=False)) == ()
    assert {B for B, _ in shared_shapes(sizes, (3, 40))} == {3, 40, 100}


def test_every_level_of_few_requests_has_a_shape_where_rows_are_dear():
    """One more row of a single request reads as many experts as the first."""
    sizes = EngineSizes(
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        num_kv_blocks=1,
        num_speculative_tokens=5,
        is_adaptive=True,
    )
    of_dense, of_experts = (set(shared_shapes(sizes, num_dear=n)) for n in (0, 20))
    assert of_dense < of_experts
    assert {n for B, n in of_experts if B == 1} == {1, 2, 3, 4, 5, 6}
    assert {n for B, n in of_experts - of_dense if B == 4} == {8, 12}  # 20 has none more
    assert {n for B, n in of_dense if B == 1} == {1, 4, 6}


@pytest.mark.parametrize("max_num_seqs, K", [(64, 3), (40, 15), (9, 1), (1, 3)])
def test_each_kind_of_decided_rows_is_compiled_ahead(max_num_seqs, K):
    sizes = EngineSizes(
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=max_num_seqs,
        num_kv_blocks=1,
        num_speculative_tokens=K,
    )
    runner = SimpleNamespace(
        sizes=sizes, step_of=lambda round, *_: round.num_verified * (K + 1) + len(round.parts)
    )
    found = {kind(rows) for rows in mixed_steps(runner, GREEDY)}
    found |= {kind(count) for count in request_counts(runner, 1)}
    found |= {kind(count * (K + 1)) for count in request_counts(runner, K + 1)}
    # of requests that verify and prompts that end, together at most max_num_seqs
    pairs = ((v, e) for v in range(max_num_seqs) for e in range(1, max_num_seqs - v + 1))
    assert found >= {kind(v * (K + 1) + e) for v, e in pairs}


def test_steps_compiled_ahead_fit_into_the_buffers_of_an_engine_with_tiny_chunks():
    sizes = EngineSizes(
        max_model_len=64,
        max_num_batched_tokens=1,
        max_num_seqs=6,
        num_kv_blocks=1,
        num_speculative_tokens=1,
        is_adaptive=True,
    )
    runner = SimpleNamespace(
        sizes=sizes, step_of=lambda round, *_: round.shared_rows + len(round.parts)
    )
    assert max(mixed_steps(runner, GREEDY)) <= sizes.max_num_rows == 13


@pytest.mark.parametrize("count, found", [(1, {1}), (256, {1, 192, 256})])
def test_an_adaptive_engine_can_make_every_step_that_is_compiled_ahead(count, found):
    with rows_are_shared():
        draft = {"model": "demo", "num_speculative_tokens": "auto"}
        llm = LLM("demo", draft, max_num_seqs=count, max_model_len=64, device="cpu")
    runner = llm.engine.runner
    shapes = runner.graphs.shapes
    assert any(requests > rows for requests, rows in shapes) == (count == 256)
    steps = [*forwards(runner), *samplings(runner)]
    assert {step.num_reqs for step in steps} >= found
    assert max(step.num_reqs for step in steps) == count
    assert max(step.num_tokens for step in steps) <= runner.sizes.max_num_rows
    tree = runner.sizes.tree
    paths = {tree.of(num_reqs).path_len for num_reqs in {1, runner.sizes.max_tree_requests}}
    assert len(paths) == (1 if count == 1 else 2)
    for flags in (GREEDY, DRAWN, *FLAGS):  # kernels take words and penalties for each shape
        assert {step.shape.path_len for step in steps if step.flags == flags} >= paths, flags
