"""Attention of prompts on Hopper: the bits of the other kernel, every item once, code that runs."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from specdec.kernels.attention import launch, launch_plan
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.attention.launch_plan import takes_prompt_kernel
from specdec.kernels.attention.query_rows import Paths, QueryRows
from specdec.kernels.prompt import attention, items
from specdec.kernels.prompt.attention import PromptAttention
from specdec.kernels.prompt.items import count_uneven
from tests.specdec.kernels.attention_cases import launches_of
from tests.specdec.kernels.test_query_tiles import BF16, FP16, FP32, difference
from tests.specdec.kernels.test_query_tiles import case as rows_of_requests

# lengths of the requests and how many of their last rows ask
ONE = (63, 64, 65, 127, 128, 300, 1023, 1024, 1025, 1153, 4096, 4097, 8191, 8193)
RAGGED = (1, 65, 1100, 64, 2210, 8260, 130, 1025, 8192), (1, 1, 1100, 64, 129, 70, 6, 2, 1)
EXTENTS = [
    *(((length,), (length,)) for length in ONE),
    *(((start + rows,), (rows,)) for start in (64, 1000, 8191) for rows in (65, 300, 1025)),
    ((200, 3000, 8300), (128, 128, 128)),  # as many rows each: no query_start_loc
    RAGGED,
]
SHAPES = [
    *((BF16, 128, group) for group in (1, 2, 4, 5, 7, 8)),
    *((BF16, 64, group) for group in (1, 4, 7)),
    *((FP16, 128, group) for group in (4, 5)),
    (FP16, 64, 8),
]


@pytest.fixture
def schedule(monkeypatch):
    """The functions that say which program has which item, as Python's and not Triton's."""
    names = ("num_own", "own_item", "_pair", "_item_there_and_back", "place_of_item")
    for name in names:
        kernel = getattr(items, name)
        monkeypatch.setattr(items, name, getattr(kernel, "fn", kernel))
    return items


def items_of(schedule, programs: int, num_items: int, uneven: int = 0) -> list[list[int]]:
    """By program."""
    return [
        [
            schedule.own_item(i, place, programs, num_items, uneven)
            for i in range(schedule.num_own(place, programs, num_items))
        ]
        for place in range(programs)
    ]


@pytest.mark.parametrize("least", [0, 100, 600, 10**6])
@pytest.mark.parametrize(
    "tiles, slots, G", [(1, 1, 1), (16, 1, 8), (64, 1, 8), (256, 1, 8), (33, 5, 3), (3, 9, 2)]
)
def test_every_item_is_computed_once(schedule, tiles, slots, G, least):
    """2,048 and 8,192 tokens are 64 and 256 tiles: items do not divide by the multiprocessors."""
    num_items = tiles * slots * G
    programs = min(num_items, 132)
    uneven = count_uneven(programs, num_items, least)
    found = [item for own in items_of(schedule, programs, num_items, uneven) for item in own]
    assert sorted(found) == [*range(num_items)]
    places = [schedule.place_of_item(item, num_items, slots, G) for item in found]
    assert {*places} == {*product(range(tiles), range(slots), range(G))}


@pytest.mark.parametrize("programs", [132, 114, 78])
@pytest.mark.parametrize(
    "tiles, keys_before, more",
    [(256, 0, 1.03), (256, 8192, 1.004), (256, 24576, 1.02), (255, 8192, 1.004), (64, 2048, 1.03)],
)
def test_heavy_items_come_first_and_programs_have_as_much(
    schedule, tiles, keys_before, more, programs
):
    """Chunks of a prompt behind as many keys; 32 tokens a tile, in tiles of 64 keys."""
    G = 8
    uneven = count_uneven(programs, tiles * G, keys_before / (32 / G))
    weights = [
        [
            keys_before // 64 + schedule.place_of_item(item, tiles * G, 1, G)[0] // 2 + 1
            for item in own
        ]
        for own in items_of(schedule, programs, tiles * G, uneven)
    ]
    assert all(a >= b for own in weights for a, b in pairwise(own))
    totals = [sum(own) for own in weights]
    assert max(totals) <= more * sum(totals) / programs


@pytest.fixture
def prompts_on(monkeypatch):
    """prompts_on(more_than): prompts are the prompt kernel's from more query rows on."""
    return lambda more_than: monkeypatch.setattr(launch_plan, "PROMPT_MORE_THAN", more_than)


def chunk(max_query_len: int) -> QueryRows:
    nothing = torch.zeros(1, dtype=torch.int64)
    return QueryRows(
        block_table=nothing,
        idx_mapping=nothing,
        positions=nothing,
        max_query_len=max_query_len,
        max_seq_len=max_query_len,
    )


def test_no_pass_takes_the_prompt_kernel_unless_it_is_on(prompts_on):
    prompts_on(None)
    assert not takes_prompt_kernel(chunk(8192), 4, 64, 128, BF16, True)


def test_large_passes_take_the_prompt_kernel_where_it_fits(prompts_on):
    prompts_on(1024)
    chosen = [takes_prompt_kernel(chunk(n), 4, 64, 128, BF16, True) for n in (16, 256, 257, 8192)]
    assert chosen == [False, False, True, True]
    assert not takes_prompt_kernel(chunk(8192), 4, 64, 128, BF16, False)  # no wgmma
    wrong = [(17, 64, 128, BF16), (4, 32, 128, BF16), (4, 64, 128, FP32)]
    wrong += [(4, 64, C, BF16) for C in (80, 96, 256)]
    assert not any(takes_prompt_kernel(chunk(8192), *sizes, True) for sizes in wrong)
    assert takes_prompt_kernel(chunk(8192), 16, 64, 64, FP16, True)


def test_rounds_and_trees_never_take_the_prompt_kernel(prompts_on):
    prompts_on(0)
    assert not takes_prompt_kernel(chunk(16), 8, 64, 128, BF16, True)
    tree = replace(chunk(60), paths=Paths(slots=torch.zeros(60, 1), starts=torch.zeros(1)))
    assert not takes_prompt_kernel(tree, 8, 64, 128, BF16, True)


def test_a_pass_is_prepared_once_and_launched_for_each_layer(prompts_on, monkeypatch):
    prompts_on(1024)
    q, cache = torch.zeros(300, 8, 64, dtype=BF16), torch.zeros(2, 3, 2, 64, 64, dtype=BF16)
    prepared, launched = [], []

    def recorder(*of):
        prepared.append(of)
        return lambda *tensors: launched.append(tensors)

    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(launch, "PromptAttention", recorder)
    rows, out = replace(chunk(300), max_seq_len=1000), torch.zeros_like(q)
    layers = cache, cache.clone()
    for layer in layers:
        launch_paged_attention(q, out, layer, rows)
    assert len(prepared) == 1
    assert prepared[0][2] is rows
    assert [of[0] is out and of[1] is q for of in launched] == [True, True]
    assert [of[2].data_ptr() for of in launched] == [layer.data_ptr() for layer in layers]


def test_items_are_dealt_out_by_the_keys_before_a_chunk(monkeypatch):
    asked = []
    monkeypatch.setattr(attention, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(attention, "count_uneven", lambda *of: asked.append(of))
    q, cache = torch.zeros(300, 8, 64, dtype=BF16), torch.zeros(2, 3, 2, 64, 64, dtype=BF16)
    table = torch.zeros(2, 16, dtype=torch.int64)
    PromptAttention(q, cache, replace(chunk(300), max_seq_len=1000, block_table=table), scale=0.125)
    assert asked == [(20, 20, 700 / (32 / 2))]  # 10 tiles of 32 tokens, 2 kv heads


@pytest.mark.parametrize("kernel", ["prompt", "wide"])
@pytest.mark.parametrize(
    "heads, G, C, dtype",
    [
        (32, 8, 128, "bf16"),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in [
                (8, 8, 128, "bf16"),
                (28, 4, 128, "fp16"),
                (64, 8, 64, "bf16"),
                (64, 8, 64, "bf16 window sinks"),
                (32, 8, 128, "fp16 window"),
            ]
        ),
    ],
)
def test_it_compiles_without_a_gpu(kernel, heads, G, C, dtype):
    """And the walk of large trees. Without the interpreter, which has kernels of its own."""
    if kernel == "wide" and " " in dtype:
        pytest.skip("windows and sinks are nothing to it")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.kernels.compile_warp_roles", kernel]
    done = subprocess.run(
        [*command, *map(str, (heads, G, C)), *dtype.split()],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shared, num_wgmma = map(int, done.stdout.split())
    assert shared <= 227 * 1024
    assert num_wgmma > 0


def with_padding(q: Tensor, rows: QueryRows) -> tuple[Tensor, QueryRows]:
    """A batch slot without a request, and rows of none; without query_start_loc nothing."""
    starts = rows.query_start_loc
    if starts is None:
        return q, rows
    padded = replace(
        rows,
        positions=torch.cat([rows.positions, rows.positions.new_zeros(9)]),
        idx_mapping=torch.cat([rows.idx_mapping, rows.idx_mapping.new_full((1,), -1)]),
        query_start_loc=torch.cat([starts, starts[-1:] + 3]),
    )
    return torch.cat([q, q.new_zeros(9, *q.shape[1:])]), padded


def attend(more_than, prompts_on, q: Tensor, cache: Tensor, rows: QueryRows) -> Tensor:
    prompts_on(more_than)
    rows.launches.clear()
    out = torch.full_like(q, torch.nan)
    launch_paged_attention(q, out, cache, rows)
    is_prompt_kernel = isinstance(launches_of(rows)[0], PromptAttention)
    assert is_prompt_kernel == (more_than is not None)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, C, group", SHAPES)
def test_a_gpu_gives_the_bits_of_the_other_kernel(prompts_on, dtype, C, group):
    torch.manual_seed(0)
    different = []
    sizes = {"group": group, "G": 2, "C": C, "dtype": dtype, "device": "cuda"}
    for kind, extents in product(("normal", "large", "cancelling"), EXTENTS):
        q, cache, rows = rows_of_requests(kind, extents, **sizes)
        num_rows = len(q)
        q, rows = with_padding(q, rows)
        expected = attend(None, prompts_on, q, cache, rows)[:num_rows]
        found = attend(0, prompts_on, q, cache, rows)
        assert expected.isfinite().all(), (kind, extents)
        assert found[num_rows + 3 :].isnan().all(), (kind, extents)  # rows of no batch slot
        if not torch.equal(found[:num_rows], expected):
            different.append((kind, extents, difference(found[:num_rows], expected)))
    assert not different, "\n".join(map(str, different))


@pytest.mark.gpu
def test_each_layer_reads_its_own_cache_and_writes_its_own_rows(prompts_on):
    """Descriptors are found again by address: two layers, and queries that begin inside others."""
    torch.manual_seed(0)
    sizes = {"group": 4, "G": 2, "C": 128, "dtype": BF16, "device": "cuda"}
    q, cache, rows = rows_of_requests("normal", RAGGED, **sizes)
    more = torch.cat([q[:8].neg(), q])
    for layer in (cache, cache.flip(0).contiguous(), cache):
        expected = attend(None, prompts_on, q, layer, rows)
        prompts_on(0)
        rows.launches.clear()
        for queries in (q, more[8:], q):
            found = torch.full_like(q, torch.nan)
            launch_paged_attention(queries, found, layer, rows)
            assert torch.equal(found, expected)
