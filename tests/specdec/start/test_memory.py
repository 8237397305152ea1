"""A GPU's memory adds up to the budget, and what does not fit is refused with what to lower."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from scripts.random_pair import write_pair
from specdec.bench.pair import load_pair
from specdec.config import EngineConfig
from specdec.models.build import bytes_per_block
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.sizes import BLOCK_SIZE, EngineSizes
from specdec.start.memory import (
    MemoryNeeds,
    memory_table,
    of_all_ranks,
    plan_memory,
    run_largest_steps,
)
from specdec.start.sizing import GIB, largest_sizes
from specdec.start.speculation import drafting_of
from tests.specdec.graph_walk import caches, make_backend, tiny, tiny_runner
from weights.arrange import arrange
from weights.files.reader import Reader
from weights.load import bind_target
from weights.report import Log

SIZES = EngineSizes(
    max_model_len=2048,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    num_kv_blocks=64 * 32,
    num_speculative_tokens=5,
)


def needs(**changes):
    values = {
        "total": 80 * GIB,
        "weights": 16 * GIB,
        "other": 2 * GIB,
        "step": 3 * GIB,
        "logits": GIB // 5,
    }
    pools = {
        "target_prefill": GIB // 2,
        "target_decode": GIB // 4,
        "draft_prefill": 0,
        "draft_decode": GIB // 8,
    }
    return MemoryNeeds(**(values | {"pools": pools, "block": 16 << 20} | changes))


def test_the_plan_of_several_ranks_fits_the_one_with_least():
    own = needs()
    other = needs(total=70 << 30, weights=1 << 30, step=5 << 30)
    values = iter([other.total, -other.weights, -other.other, -other.step])
    found = of_all_ranks(own, lambda value: min(value, next(values, value)))
    assert found == replace(own, total=min(own.total, 70 << 30), step=max(own.step, 5 << 30))
    assert of_all_ranks(own, lambda value: value) == own


def needs_of_120b(directory, total):
    """What gpt-oss-120b needs for 64 requests of up to 32,768 tokens, and its sizes."""
    write_pair(directory, "gpt-oss-120b")
    config, wanted, _ = bind_target(Reader(directory / "target"), Log())
    plan = arrange(wanted)
    weights = sum(
        math.prod(shape) * plan.dtypes.get(name, torch.bfloat16).itemsize
        for name, shape in plan.shapes.items()
    )
    asked = EngineConfig(max_model_len=32768, max_num_seqs=64)
    sizes = largest_sizes(asked, drafting_of(None, has_graphs=True), config, None)
    block = bytes_per_block(config.heads, config.num_layers, torch.bfloat16)
    return needs(total=total, weights=weights, block=block), sizes


def test_gpt_oss_120b_plans_its_memory_on_one_gpu(tmp_path):
    given, sizes = needs_of_120b(tmp_path, total=140 * GIB)
    assert 60 * GIB < given.weights < 62 * GIB
    blocks = plan_memory(given, 0.9, sizes)
    assert 64 * 8192 < blocks * BLOCK_SIZE < 64 * 32768  # not all can be as long at a time
    assert "weights" in memory_table(given, 0.9, blocks)
    with pytest.raises(ValueError, match="max_model_len=32768 need"):
        plan_memory(replace(given, total=64 * GIB), 0.9, sizes)


def test_the_cache_gets_the_rest_of_the_budget():
    given = needs(block=64 << 20)
    blocks = plan_memory(given, 0.9, SIZES)
    left = 0.9 * given.total - given.without_cache
    assert left - given.block < blocks * given.block <= left


def test_the_cache_is_never_larger_than_all_rows_can_fill():
    assert plan_memory(needs(), 0.9, SIZES) == SIZES.num_kv_blocks


def test_a_cache_for_just_one_request_is_enough():
    least = needs(block=64 << 20).without_cache + SIZES.blocks_per_request * (64 << 20)
    blocks = plan_memory(needs(block=64 << 20, total=least), 1.0, SIZES)
    assert blocks == SIZES.blocks_per_request
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        plan_memory(needs(block=64 << 20, total=least - 1), 1.0, SIZES)


@pytest.mark.parametrize(
    "changes, first",
    [
        ({"weights": 70 * GIB}, "lower max_num_batched_tokens=8192 or max_num_seqs=64"),
        (
            {"pools": {"target_prefill": 60 * GIB}},
            "give fewer cuda_graph_sizes and cuda_graph_token_sizes",
        ),
        ({"block": 4 * GIB}, "lower max_model_len=2048"),
    ],
)
def test_an_overfull_budget_says_what_to_lower_first(changes, first):
    with pytest.raises(
        ValueError, match=r"gpu_memory_utilization=0.9 of 80.00 GiB is 72.00 GiB; weights"
    ) as error:
        plan_memory(needs(**changes), 0.9, SIZES)
    assert f"GiB: {first}" in str(error.value)
    assert str(error.value).endswith("or raise gpu_memory_utilization")


def test_the_table_adds_up_to_the_device():
    given = needs()
    lines = memory_table(given, 0.9, plan_memory(given, 0.9, SIZES)).splitlines()
    *parts, total = [float(line.split()[-2]) for line in lines]
    assert sum(parts) == pytest.approx(total, abs=0.05)
    assert [line for line in lines if f"cache: 2048 blocks, {2048 * BLOCK_SIZE} tokens" in line]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("backend", ["eager", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_largest_steps_write_scratch_only(backend):
    runner = tiny_runner(tiny("eagle3", make_backend(backend)[1]), 3)
    runner.start_rows([(0, RowStart(blocks=[0, 1], num_draft_tokens=3))])
    before = {
        name: value[:-1].clone()
        for name, value in vars(runner.state).items()
        if torch.is_tensor(value)
    }
    run_largest_steps(runner)
    counters = runner.graphs.counters()
    assert backend != "eager" or not counters.pop("target_choice").dispatches  # after graphs alone
    assert all(counter.dispatches.total() for counter in counters.values())
    assert all(
        torch.equal(getattr(runner.state, name)[:-1], value) for name, value in before.items()
    )
    assert all(cache[:, :, :-1].isnan().all() for cache in caches(runner))


def test_the_largest_steps_of_an_adaptive_engine_fit_its_buffers():
    """Of 100 requests with 8 drafts each 512 rows verify, beside a single row of prompts."""
    captures, device = make_backend("eager")
    pair = tiny("eagle3", device)
    sizes = EngineSizes(
        max_model_len=100,
        max_num_seqs=100,
        max_num_batched_tokens=1,
        num_kv_blocks=1,
        num_speculative_tokens=8,
        is_adaptive=True,
    )
    runner = Runner(pair.target, pair.eagle, sizes, device, backend=captures)
    rows = []
    forward = runner.target.forward
    runner.target.forward = lambda step: rows.append(step.num_tokens) or forward(step)
    run_largest_steps(runner)
    assert rows == [513, 100, 512] * 2
    assert runner.num_levels == 2 * (8 + 0 + 8) + 2 * 0


@pytest.mark.gpu
def test_a_shortened_model_has_nearly_the_peak_of_the_whole_one():
    pair = load_pair("demo", "demo", "cuda", "auto")
    sizes = EngineSizes(
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        num_kv_blocks=1,
        num_speculative_tokens=3,
    )
    runner = Runner(pair.target, pair.eagle, sizes, torch.device("cuda"))
    peaks = []
    for model in (runner.target.model.shortened(), nullcontext()):
        with model:
            run_largest_steps(runner)  # which compiles kernels, too
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            run_largest_steps(runner)
            # not the bytes of blocks: one may be up to a MiB larger than what lies in it
            peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
    assert 0.97 * peaks[1] < peaks[0] <= peaks[1]
