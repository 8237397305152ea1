"""What exactness costs: the shipped round or chunk against the fastest one, exact or not.

The others take products from cuBLAS, whose sums change with the number of rows, rounded to the
model's dtype as soon as they may be, those of 8 bits from torch's _scaled_mm (use_fast_accum), and
those of experts from torch's grouped ones; attention from
the yardsticks; or both. A router's product stays ours: it has few columns. All are inside the
same engine, whose other kernels stay what they are: whole captured rounds of requests that all have
one length of context, and whole eager chunks, nothing composed from parts. Whatever the tokens are
then, their number is the same. The yardstick is the fastest of those in which something is
exchanged, so never the shipped one, and its price may be negative.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphs.context import get_forward_context
from specdec.bench.bench import MOST_CONTEXT, Bench
from specdec.bench.expert_yardstick import grouped_experts
from specdec.bench.fp8_yardstick import scaled_mm
from specdec.bench.pair import EngineSpec, Pair, joined
from specdec.bench.report import Row
from specdec.bench.timing import Clock, time_rounds, tokens_needed
from specdec.bench.yardsticks import Attend, Yardstick, first_line, yardsticks
from specdec.kernels import jit, tl
from specdec.kernels.backend import Backend, using
from specdec.kernels.fp8.weight import Fp8, Fp8Rows
from specdec.models.attention import AttentionMetadata
from specdec.scheduling.work import PromptPart
from specdec.sizes import BLOCK_SIZE
from specdec.start.speculation import Drafting

Names = tuple[str, ...]  # what is exchanged
SHIPPED: Names = ()
OF_ROUNDS: Sequence[Names] = (("layers",), ("heads",), ("layers", "heads"))
OF_CHUNKS: Sequence[Names] = (("layers",),)
FP8_PRODUCTS = "fp8_linear", "fp8_split_linear", "fp8_gate_up"
PROMPTS = (2048, 8192)
BLOCK = 1024  # of silu_mul


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The last `rows` of `context` positions ask, of each of `batch` requests."""

    batch: int
    rows: int
    context: int


def exactness(bench: Bench) -> Iterator[Row]:
    """Price the promise that rows do not depend on their neighbours, on a GPU only.

    Whole rounds and chunks are timed with cuBLAS's products and with others' attention.
    """
    if bench.pair.device.type != "cuda":
        return
    bench.pair.drop()
    options = bench.options
    for K, batch, context in product(bench.ks, bench.batches, bench.contexts):
        what = f"exactness: K = {K}, batch {batch}, context {context}"
        room = tokens_needed(options.num_rounds, K)
        if _is_possible(bench, what, [context] * batch, room):
            yield from of_rounds(bench, K, batch, context)
    for length in PROMPTS:
        if _is_possible(bench, f"exactness: prompt of {length} tokens", [length], 1):
            yield from of_chunks(bench, max(bench.ks), length)


def _is_possible(bench: Bench, what: str, lengths: Sequence[int], room: int) -> bool:
    """Say whether it can be measured, and note it if not.

    lengths: tokens of each prompt; room: tokens after each
    """
    longest = bench.pair.target.config.max_position_embeddings - room
    if max(lengths) > longest:
        bench.skipped.append(f"{what}: the target has room for {longest} tokens")
        return False
    if sum(lengths) > MOST_CONTEXT:
        bench.skipped.append(f"{what}: more than {MOST_CONTEXT} tokens")
        return False
    return bench.has_time(what)


def of_rounds(bench: Bench, K: int, batch: int, context: int) -> list[Row]:
    """Time captured rounds of requests after so many tokens of context."""
    options = bench.options
    pair = bench.pair
    room = tokens_needed(options.num_rounds, K)
    prompts = [joined(pair.prompts, context, i) for i in range(batch)]
    spec = EngineSpec(
        drafting=Drafting(K),
        max_num_seqs=batch,
        max_tokens=context + room,
        max_model_len=max(options.model_len, context + room),
        request_sizes=(batch,),
    )

    def time() -> float:
        try:
            return time_rounds(pair.engine(spec), prompts, options.num_rounds).median
        finally:
            pair.drop()

    times = timings(time, pair, Job(batch=batch, rows=K + 1, context=context), OF_ROUNDS)
    columns: Row = {"num_speculative_tokens": K, "batch": batch, "context": context}
    return priced(columns, "device_round_ms", times)


def of_chunks(bench: Bench, K: int, length: int) -> list[Row]:
    """Time eager chunks, each a whole prompt."""
    pair = bench.pair
    job = Job(batch=1, rows=length, context=length)
    times = timings(lambda: chunk_ms(pair, K, length), pair, job, OF_CHUNKS)
    pair.drop()
    columns: Row = {"num_speculative_tokens": K, "batch": 1, "prompt_tokens": length}
    return priced(columns, "chunk_ms", times)


def chunk_ms(pair: Pair, K: int, length: int) -> float:
    """Time a whole prompt in one chunk op by op, with the draft's part of it; the median."""
    drafting, room = Drafting(K), length + 64
    spec = EngineSpec(drafting=drafting, max_num_seqs=1, max_model_len=room, enforce_eager=True)
    engine = pair.engine(spec)
    prompt = joined(pair.prompts, length)
    blocks = list(range(-(-length // BLOCK_SIZE)))
    part = PromptPart(state_row=-1, prompt=prompt, start=0, length=length, blocks=blocks)
    return Clock(pair.device).repeat(lambda: engine.runner.run_step(parts=[part]), 6, 2).median


def timings(
    time: Callable[[], float], pair: Pair, job: Job, products: Sequence[Names]
) -> dict[Names, float | str]:
    """Time the shipped one, each exchange, and the best of both kinds together, in milliseconds.

    A text in place of milliseconds says why an attention is not possible.
    """
    times: dict[Names, float | str] = {}
    attentions = [(name,) for name in yardsticks(pair.device)]

    def add(names: Names, may_fail: bool = True) -> None:
        try:
            with using(backend_of(names, job, pair.device)):
                times[names] = time()
        except (RuntimeError, ValueError) as error:  # in the row, beside the others' times
            if not may_fail:
                raise
            times[names] = first_line(error)

    for names in (SHIPPED, *products):
        add(names, may_fail=False)
    for names in attentions:
        add(names)
    best_products, best_attention = _fastest(times, products), _fastest(times, attentions)
    if best_products and best_attention:
        add((*best_products, *best_attention))
    return times


def priced(columns: Row, unit: str, times: Mapping[Names, float | str]) -> list[Row]:
    """Make a row for each, with the price of the shipped one against it."""
    shipped = times[SHIPPED]
    assert isinstance(shipped, float), shipped
    yardstick = _fastest(times, [names for names in times if names != SHIPPED])
    rows = []
    for names, found in times.items():
        time, error = (found, None) if isinstance(found, float) else (None, found)
        rows.append(
            {
                **columns,
                "exchanged": " + ".join(names) or "nothing (shipped)",
                unit: time,
                "price": None if time is None else shipped / time - 1,
                "is_yardstick": names == yardstick,
                "error": error,
            }
        )
    return rows


def _fastest(times: Mapping[Names, float | str], among: Sequence[Names]) -> Names | None:
    """Choose the fastest that is possible; None if none is."""
    found = {names: time for names in among if isinstance(time := times[names], float)}
    return min(found, key=found.__getitem__, default=None)


def backend_of(names: Sequence[str], job: Job, device: torch.device) -> Backend:
    """Say who computes what. names: "layers", "heads", or a yardstick's.

    job: what attention computes in each layer
    """
    chosen: dict[str, Any] = {}
    for name in names:
        if name == "layers":
            products = cublas_linear, cublas_sums, cublas_gate_up
            chosen |= zip(("linear", "split_linear", "gate_up"), products, strict=True)
            chosen |= zip(FP8_PRODUCTS, (scaled_linear, scaled_sums, scaled_gate_up), strict=True)
            chosen["experts"] = grouped_experts
        elif name == "heads":
            chosen["tile_maxima"] = cublas_tile_maxima
        else:
            chosen["attend"] = ContiguousAttention(yardsticks(device)[name], job)
    return Backend(**chosen)


def cublas_linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype == x_TK.dtype:
        return F.linear(x_TK, weight_NK, bias_N)
    out_TN = torch.mm(x_TK, weight_NK.t(), out_dtype=out_dtype)
    return out_TN if bias_N is None else out_TN + bias_N


def cublas_sums(x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Make all columns: `first` says which may be left out."""
    return torch.mm(x_TK, weight_NK.t(), out_dtype=dtype)[None]


def cublas_gate_up(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor | None) -> Tensor:
    return silu_mul(F.linear(x_TD, weight_XD, bias_X))


def scaled_linear(x: Fp8Rows, weight: Fp8, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply by _scaled_mm with fast accumulation; of blocks it takes one scale a row."""
    of_x, of_w = (each.scales[0] if each.is_block else each.scales for each in (x, weight))
    scales = of_x[: len(x.codes_TK)], of_w
    out_TN = scaled_mm(x.codes_TK, weight.codes_NK, *scales, dtype, use_fast_accum=True)
    return out_TN if bias_N is None else out_TN + bias_N


def scaled_sums(x: Fp8Rows, weight: Fp8, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Make all columns, rounded to 16 bits: `first` says which may be left out."""
    return scaled_linear(x, weight, None, torch.bfloat16).to(dtype)[None]


def scaled_gate_up(x: Fp8Rows, weight: Fp8, bias_X: Tensor | None, dtype: torch.dtype) -> Tensor:
    return silu_mul(scaled_linear(x, weight, bias_X, dtype))


def silu_mul(gate_up_TX: Tensor) -> Tensor:
    """Compute silu(gate) * up, [T, 2I] to [T, I]: gate columns come before up columns."""
    T, X = gate_up_TX.shape
    out_TI = torch.empty(T, X // 2, dtype=gate_up_TX.dtype, device=gate_up_TX.device)
    _silu_mul_kernel[(T, -(-X // 2 // BLOCK))](out_TI, gate_up_TX, X // 2, BLOCK=BLOCK)
    return out_TI


@jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(out_ptr, gate_up_ptr, I, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + t * 2 * I + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + t * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + t * I + i, y.to(out_ptr.dtype.element_ty), mask=i < I)


def cublas_tile_maxima(x_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best of each part of the vocabulary, for the second kernel of best_token.py."""
    logits_TV = F.linear(x_TD, weight_VD)
    parts = math.gcd(len(weight_VD), 256)
    best_TP, ids_TP = logits_TV.view(len(x_TD), parts, -1).max(dim=-1)
    first_P = torch.arange(parts, device=x_TD.device) * (len(weight_VD) // parts)
    return best_TP.t().float().contiguous(), (ids_TP + first_P).t().to(torch.int32).contiguous()


class ContiguousAttention:
    """A yardstick in place of `attend`, over keys of its own.

    It does the same job: as many rows and heads, in every layer of the target and the draft, over
    as many keys and values as the context has, in the model's dtype, in memory of each layer's own,
    so that no cache holds them. What differs: keys are random and lie in one piece (no paging, no
    block table), their number stays that of the context while ours grow with the rounds, and what
    an engine stores goes to the paged cache, which is not read.

    It has to outlive graphs that captured it: they read its keys. A capture would record what is
    made in it, so keys and masks are made in the warm-up before.
    """

    def __init__(self, yardstick: Yardstick, job: Job) -> None:
        self._yardstick = yardstick
        self._job = job
        self._keys: dict[int, Tensor] = {}  # [L, 2, B, G, context, C] by address of the paged cache
        self._calls: dict[tuple[torch.Size, torch.Size], Attend] = {}  # by shapes of q and k

    def __call__(self, q_THC: Tensor, out_THC: Tensor, layer: int, is_picked: bool) -> None:
        metadata = get_forward_context().attn_metadata
        assert isinstance(metadata, AttentionMetadata), type(metadata)
        rows, *others = metadata.finished if is_picked else metadata.groups
        is_prompt = rows.query_start_loc is not None
        if others or (is_prompt and self._job.rows < self._job.context):
            out_THC.copy_(q_THC)  # prompts before the rounds, whose time does not count
            return
        B = len(rows.idx_mapping)
        _, H, C = q_THC.shape
        q = q_THC.view(B, -1, H, C).transpose(1, 2)
        k, v = self._keys_of(metadata.layer_caches)[layer, :, :B]
        found = self._call(q, k)(q, k, v).transpose(1, 2).reshape(q_THC.shape)
        # no copy: the next product reads the result where it is
        out_THC.set_(found.untyped_storage(), found.storage_offset(), found.shape, found.stride())

    def _keys_of(self, caches: Sequence[Tensor]) -> Tensor:
        """Make the keys of all layers at once: an engine warms up with some of them.

        caches: of each layer [2, N + 1, G, S, C]
        """
        cache = caches[0]
        address = cache.data_ptr()
        if address not in self._keys:
            _check_no_capture(cache)
            _, _, G, _, C = cache.shape
            shape = (len(caches), 2, self._job.batch, G, self._job.context, C)
            self._keys[address] = torch.randn(shape, dtype=cache.dtype, device=cache.device)
        return self._keys[address]

    def _call(self, q: Tensor, k: Tensor) -> Attend:
        shapes = q.shape, k.shape
        if shapes not in self._calls:
            _check_no_capture(q)
            self._calls[shapes] = self._yardstick(q, k)
        return self._calls[shapes]


def _check_no_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"no warm-up before the capture of {tuple(x.shape)}")
