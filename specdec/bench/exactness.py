"""What exactness costs: the shipped round against the fastest round, exact or not.

The others take products from cuBLAS, whose sums change with the number of rows, or let attention
choose between splits and one program per tile by the number of programs. Each of the three places
is exchanged alone and with the others; the fastest round is the yardstick. Everything is captured,
in one process. Attention is ours in all of them, cut in two ways; the suite attention compares it
with others.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.bench.bench import Bench
from specdec.bench.pair import EngineSpec
from specdec.bench.report import Row
from specdec.bench.rounds import time_rounds, tokens_needed
from specdec.kernels import best_token, gate_up, jit, linear, tl
from specdec.kernels.attention import launch_plan
from specdec.stepping import propose

BLOCK = 1024  # of silu_mul
Replacement = tuple[object, str, object]  # module, name, what to use instead


def cublas_linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype == x_TK.dtype:
        return F.linear(x_TK, weight_NK, bias_N)
    out_TN = torch.mm(x_TK, weight_NK.t(), out_dtype=out_dtype)
    return out_TN if bias_N is None else out_TN + bias_N


def cublas_sums(x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(x_TK, weight_NK.t(), out_dtype=dtype)[None]


def cublas_gate_up(x_TD: Tensor, weight_XD: Tensor, bias_X: Tensor | None) -> Tensor:
    return silu_mul(F.linear(x_TD, weight_XD, bias_X))


def silu_mul(gate_up_TX: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2I] to [T, I]: gate columns before up columns."""
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


def cublas_tile_maxima(
    x_TD: Tensor, weight_VD: Tensor, mask: object = None
) -> tuple[Tensor, Tensor]:
    """The best of each part of the vocabulary, for the second kernel of best_token.py."""
    logits_TV = torch.mm(x_TD, weight_VD.t(), out_dtype=torch.float32)
    parts = math.gcd(len(weight_VD), 256)
    best_TP, ids_TP = logits_TV.view(len(x_TD), parts, -1).max(dim=-1)
    first_P = torch.arange(parts, device=x_TD.device) * (len(weight_VD) // parts)
    return best_TP.t().contiguous(), (ids_TP + first_P).t().to(torch.int32).contiguous()


EXCHANGES: dict[str, list[Replacement]] = {
    "layers": [
        (linear, "launch_linear", cublas_linear),
        (linear, "launch_split_linear", cublas_sums),
        (gate_up, "launch_gate_up", cublas_gate_up),
    ],
    "heads": [
        (best_token, "launch_tile_maxima", cublas_tile_maxima),
        (propose, "launch_tile_maxima", cublas_tile_maxima),
    ],
    "attention": [(launch_plan, "MAX_SPLIT_TOKENS", 0)],
}


def exactness(bench: Bench) -> Iterator[Row]:
    """What it costs that rows do not depend on their neighbours. On a GPU only."""
    for K in bench.ks if bench.pair.device.type == "cuda" else ():
        bench.pair.drop()
        for batch in bench.options.batches:
            if bench.has_time(f"exactness: K = {K}, batch {batch}"):
                times = {names: _round_ms(bench, K, batch, names) for names in combinations()}
                yield from compared(K, batch, times)


def compared(K: int, batch: int, times: Mapping[tuple[str, ...], float]) -> list[Row]:
    """Milliseconds by what is exchanged, and the price of the shipped round against each."""
    shipped = times[()]
    fastest = min(times.values())
    return [
        {
            "num_speculative_tokens": K,
            "batch": batch,
            "exchanged": " + ".join(names) or "nothing (shipped)",
            "device_round_ms": milliseconds,
            "price": shipped / milliseconds - 1,
            "is_yardstick": milliseconds == fastest,
        }
        for names, milliseconds in times.items()
    ]


def combinations() -> list[tuple[str, ...]]:
    """Nothing exchanged, each place, each two, all three."""
    counts = range(len(EXCHANGES) + 1)
    return [names for count in counts for names in itertools.combinations(EXCHANGES, count)]


def _round_ms(bench: Bench, K: int, batch: int, names: Sequence[str]) -> float:
    """The median of a captured round with these places exchanged."""
    pair = bench.pair
    num_rounds = bench.options.num_rounds
    prompts = bench.prompts(batch)[:batch]
    spec = EngineSpec(
        num_speculative_tokens=K,
        max_num_seqs=batch,
        max_tokens=max(map(len, prompts)) + tokens_needed(num_rounds, K),
        max_model_len=bench.options.model_len,
        request_sizes=(batch,),
    )
    with exchanged(names):
        median = time_rounds(pair.engine(spec), prompts, num_rounds).median
        pair.drop()
    return median


@contextmanager
def exchanged(names: Sequence[str]) -> Iterator[None]:
    """Replace the kernels' launchers of these places while the body runs."""
    with ExitStack() as stack:
        for replacement in itertools.chain.from_iterable(EXCHANGES[name] for name in names):
            stack.enter_context(patch.object(*replacement))
        yield
