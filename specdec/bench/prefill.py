"""Prompts: how long they take, and what exactness costs, with cuBLAS and both attentions beside.

torch's attention (scaled_dot_product_attention, by FlashAttention or cuDNN) reads contiguous keys,
ours the paged cache. Each is timed alone; the fastest chunk is computed from these times.
"""

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from specdec.bench.bench import Bench
from specdec.bench.exactness import exchanged
from specdec.bench.pair import EngineSpec, Pair, joined, turned
from specdec.bench.report import Row
from specdec.bench.serving import generate, greedy
from specdec.bench.timing import Clock, Spread
from specdec.kernels.attention.launch import paged_attention
from specdec.kernels.attention.query_rows import QueryRows
from specdec.scheduling.work import PromptPart
from specdec.sizes import BLOCK_SIZE

LENGTHS = (512, 2048, 8192)
FIRST_TOKEN_LENGTHS = (64, 128, 256, 512, 1024, 2048, 8192, 16384)
MANY_PROMPTS = 32, 4096  # at once, of so many tokens
NUM_FIRST_TOKENS = 12  # requests of each length, of which the first two do not count


def prefill(bench: Bench) -> Iterator[Row]:
    """One prompt in one eager chunk, ours against cuBLAS and torch's attention. On a GPU only."""
    limit = bench.pair.target.config.max_position_embeddings
    for length in LENGTHS if bench.pair.device.type == "cuda" else ():
        if length < limit and bench.has_time(f"prefill: {length} tokens"):
            yield prefill_row(bench.pair, max(bench.ks), length)
    count, length = MANY_PROMPTS
    if bench.pair.device.type == "cuda" and length < limit and bench.has_time("prefill: many"):
        yield many_prompts(bench.pair, max(bench.ks), count, length)


def first_token(bench: Bench) -> Iterator[Row]:
    """Milliseconds to the first token of one request, by graphs in pieces and op by op."""
    K = max(bench.ks)
    limit = bench.pair.target.config.max_position_embeddings
    lengths = [length for length in FIRST_TOKEN_LENGTHS if length < limit]
    few = [length for length in lengths if length <= 2048]
    for how, is_eager, these in (("graphs", False, lengths), ("op by op", True, few)):
        if not these or not bench.has_time(f"first_token: {how}"):
            continue
        spec = EngineSpec(
            num_speculative_tokens=K,
            max_num_seqs=1,
            max_model_len=these[-1] + 1,
            has_prefill_graphs=True,
            enforce_eager=is_eager,
        )
        engine = bench.pair.engine(spec)
        for length in these:
            jobs = greedy([joined(bench.pair.prompts, length)], 1)
            runs = [generate(engine, jobs) for _ in range(NUM_FIRST_TOKENS)]
            seconds = [each.stats.time_to_first_token or 0.0 for [each] in runs[2:]]
            mode = engine.runner.graphs.dispatch_ragged(1, length, 1).target.mode.name
            spread = Spread.of([1e3 * each for each in seconds])
            figures = {"ms": spread.median, "low": spread.low, "high": spread.high}
            yield {"prompt_tokens": length, "asked": how, "runs_as": mode} | figures
        bench.pair.drop(spec)


def many_prompts(pair: Pair, K: int, count: int, length: int) -> Row:
    """Seconds until so many prompts, which arrive together, have a token each."""
    spec = EngineSpec(
        num_speculative_tokens=K,
        max_num_seqs=count,
        max_model_len=length + K + 1,
        has_prefill_graphs=True,
    )
    engine = pair.engine(spec)
    seconds = []
    for run in range(3):
        prompts = [turned(pair.prompts, run * count + i, length) for i in range(count)]
        began = time.monotonic()
        generate(engine, greedy(prompts, 1))
        seconds.append(time.monotonic() - began)
    pair.drop(spec)
    return {"prompts": count, "prompt_tokens": length, "seconds": Spread.of(seconds).median}


def prefill_row(pair: Pair, K: int, length: int) -> Row:
    """One prompt of this length, both ways."""
    spec = EngineSpec(
        num_speculative_tokens=K, max_num_seqs=1, max_model_len=length + 64, enforce_eager=True
    )
    shipped = _chunk_ms(pair, spec, length, ())
    exchange = _chunk_ms(pair, spec, length, ("layers",))
    ours, torchs = _attention_ms(pair, spec, length)
    pair.drop(spec)
    fastest = min(shipped, exchange) - pair.target.config.num_layers * max(ours - torchs, 0.0)
    return {
        "prompt_tokens": length,
        "chunk_ms": shipped,
        "with_cublas_ms": exchange,
        "attention_ms_per_layer": ours,
        "torch_attention_ms_per_layer": torchs,
        "fastest_ms": fastest,
        "price": shipped / fastest - 1,
        "prompt_tokens_per_second": 1e3 * length / shipped,
    }


def _chunk_ms(pair: Pair, spec: EngineSpec, length: int, names: tuple[str, ...]) -> float:
    engine = pair.engine(spec)
    prompt = joined(pair.prompts, length)
    blocks = list(range(-(-length // BLOCK_SIZE)))
    part = PromptPart(state_row=-1, prompt=prompt, start=0, length=length, blocks=blocks)
    with exchanged(names):
        return Clock(pair.device).repeat(lambda: engine.runner.run_step(parts=[part]), 6, 2).median


@torch.inference_mode()
def _attention_ms(pair: Pair, spec: EngineSpec, T: int) -> tuple[float, float]:
    """One layer's causal attention of a prompt of T tokens: ours, torch's."""
    layer = pair.target.config.layer
    runner = pair.engine(spec).runner
    device = pair.device
    cache = runner.target_cache[0]
    H = layer.num_heads
    G = layer.num_kv_heads
    C = layer.head_dim
    q_THC = torch.randn(T, H, C, device=device, dtype=cache.dtype)
    num_rows, num_blocks = runner.state.block_table.shape
    table = torch.arange(num_blocks, device=device).repeat(num_rows, 1)
    rows = QueryRows(
        block_table=table,
        idx_mapping=torch.zeros(1, dtype=torch.int64, device=device),
        positions=torch.arange(T, device=device),
        query_start_loc=torch.tensor([0, T], device=device),
        max_query_len=T,
        max_seq_len=T,
    )
    out = torch.empty_like(q_THC)
    clock = Clock(device)
    ours = clock.repeat(lambda: paged_attention(q_THC, out, cache, rows), 10, 3).median
    q, k, v = (torch.randn(1, heads, T, C, device=device, dtype=cache.dtype) for heads in (H, G, G))
    sdpa = clock.repeat(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 10, 3
    )
    return ours, sdpa.median
