"""The parts of a decoder layer, by the checkpoint's names, for target and draft.

Every product, norm and activation goes through specdec.kernels, whose rows do not depend on their
neighbours. Letters: T rows, D hidden, H query heads, G kv heads, C channels per head, I mlp width.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdec.kernels.fp8.norms import fp8_add_rms_norm, fp8_rms_norm
from specdec.kernels.fp8.products import fp8_gate_up, fp8_linear, fp8_split_linear
from specdec.kernels.fp8.quantise import quantise, row_peaks
from specdec.kernels.fp8.weight import E4M3, Fp8, Fp8Rows, num_groups
from specdec.kernels.gate_up import gate_up
from specdec.kernels.linear import Sums, linear, split_linear
from specdec.kernels.norms import add_rms_norm, rms_norm
from specdec.kernels.rotate_and_store import HeadNorms
from specdec.kernels.sum_order import Whole
from specdec.kernels.take_rows import take_rows
from specdec.models.attention import attend, room_for, store_kv
from specdec.parallel.exchange import Exchange
from weights.config import Form, LayerKind

SHARED_ROWS = 64  # that products of FP8 blocks take one scale for, where all of them share it
Reader = Callable[[Sums, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]


class Quantised(NamedTuple):
    """Rows for products of FP8, and the dtype that they had, which results have too."""

    rows: Fp8Rows
    dtype: torch.dtype
    plain_TD: Tensor | None = None  # the rows themselves, which routers read


class Linear(nn.Module):
    """A row-invariant product with an optional bias: finished, or as sums for the next kernel.

    whole: the weight's shape [N, K] before several GPUs took rows, or neighbouring columns, of it;
        None: it is whole. Of columns, `sums` are some of the parts, and the bias is for all of them
    form:  of the weight: of FP8 it has scales, and x is quantised by rows
    exchange: with those that have the other columns of x, whose scales are of all; None: all here
    parts: rows of each of the weights of files that are concatenated in it; (): it is one
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        bias: bool = False,
        whole: Whole | None = None,
        form: Form = "plain",
        exchange: Exchange | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.whole = whole
        self.form = form
        self._exchange = exchange
        self._is_shared = form == "fp8 block" and not any(rows % SHARED_ROWS for rows in parts)
        self.bias = parameter(num_out) if bias else None
        is_fp8 = form != "plain"
        self.weight = parameter(num_out, num_in, dtype=E4M3 if is_fp8 else None)
        shape = (num_groups(num_in), num_out) if form == "fp8 block" else (num_out,)
        self.weight_scale = parameter(*shape, dtype=torch.float32) if is_fp8 else None

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.weight_scale is None:
            return linear(x_TD, self.weight, self.bias)
        x = self._quantised(x_TD)
        return fp8_linear(x.rows, self._fp8, self.bias, x.dtype)

    def sums(self, x: Tensor | Quantised, first: int = 0) -> Sums:
        """first: columns before it may hold anything."""
        if self.weight_scale is None:
            return split_linear(_plain(x), self.weight, self.bias, first, self.whole)
        x = self._quantised(x)
        return fp8_split_linear(x.rows, self._fp8, self.bias, x.dtype, first, self.whole)

    def gated(self, x: Tensor | Quantised) -> Tensor:
        """Compute SwiGLU's first half: gate rows come before up rows."""
        if self.weight_scale is None:
            return gate_up(_plain(x), self.weight, self.bias)
        x = self._quantised(x)
        return fp8_gate_up(x.rows, self._fp8, self.bias, x.dtype)

    @property
    def _fp8(self) -> Fp8:
        assert self.weight_scale is not None, self.form
        return Fp8(self.weight, self.weight_scale, self._is_shared)

    def _quantised(self, x: Tensor | Quantised) -> Quantised:
        if isinstance(x, Quantised):
            return x
        is_block = self.form == "fp8 block"
        peaks_T = None
        if self._exchange is not None and not is_block:
            peaks_T = self._exchange.largest(row_peaks(x))
        return Quantised(quantise(x, is_block, peaks_T), x.dtype)


def _plain(x: Tensor | Quantised) -> Tensor:
    assert isinstance(x, Tensor), "rows are quantised for products of FP8 alone"
    return x


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Make room for a tensor of the checkpoint."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Embedding(nn.Module):
    """Rows of a table by token id."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(num_rows, width)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.weight[ids_T]


class CutEmbedding(Embedding):
    """A rank's rows of a table; every rank finds the rows of all."""

    def __init__(self, vocab_size: int, width: int, exchange: Exchange) -> None:
        ids = exchange.shard.ids_of(vocab_size)
        super().__init__(len(ids), width)
        self._first = ids.start
        self._exchange = exchange

    def forward(self, ids_T: Tensor) -> Tensor:
        return self._exchange.embed(ids_T, self.weight, self._first)


def embedding(vocab_size: int, width: int, exchange: Exchange | None) -> Embedding:
    """Make the embedding of a whole vocabulary, or a rank's part of it."""
    if exchange is None:
        return Embedding(vocab_size, width)
    return CutEmbedding(vocab_size, width, exchange)


class RMSNorm(nn.Module):
    """`forward` norms x; `add` norms x + residual and returns that sum too: the residual stream.

    reader: what `add` calls; reads_all, reads_share below give that of several ranks
    """

    def __init__(self, width: int, eps: float, reader: Reader = add_rms_norm) -> None:
        super().__init__()
        self.weight = parameter(width)
        self.eps = eps
        self._reader = reader

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)

    def add(
        self, x: Sums, residual_TD: Tensor, tap_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Norm x + residual; return it with x + residual, which also goes to `tap_TD`."""
        return self._reader(x, residual_TD, self.weight, self.eps, tap_TD)


class QuantisingNorm(nn.Module):
    """RMSNorm before products of FP8: it leaves codes of its rows.

    form:       of the weights
    keeps_rows: `add` leaves the rows too, which a router reads
    """

    def __init__(
        self,
        width: int,
        eps: float,
        form: Form,
        reader: Reader = add_rms_norm,
        keeps_rows: bool = False,
    ) -> None:
        super().__init__()
        self.weight = parameter(width)
        self.eps = eps
        self._is_block = form == "fp8 block"
        self._reader = reader
        self._keeps_rows = keeps_rows

    def forward(self, x_TD: Tensor) -> Quantised:
        rows = fp8_rms_norm(x_TD, self.weight, self.eps, self._is_block)
        return Quantised(rows, x_TD.dtype)

    def add(
        self, x: Sums, residual_TD: Tensor, tap_TD: Tensor | None = None
    ) -> tuple[Quantised, Tensor]:
        """Do what RMSNorm.add does."""
        given = x, residual_TD, self.weight, self.eps
        normed_TD: Tensor | None
        if self._reader is add_rms_norm:
            how = self._is_block, tap_TD, self._keeps_rows
            rows, normed_TD, stream_TD = fp8_add_rms_norm(*given, *how)
        else:  # ranks gather normed rows
            normed_TD, stream_TD = self._reader(*given, tap_TD)
            rows = quantise(normed_TD, self._is_block)
        return Quantised(rows, residual_TD.dtype, normed_TD), stream_TD


Norm = RMSNorm | QuantisingNorm


def norm_before(
    form: Form, width: int, eps: float, reader: Reader, keeps_rows: bool = False
) -> Norm:
    """Make the norm whose rows one product of this form reads, and with `keeps_rows` a router."""
    if form.startswith("fp8"):
        return QuantisingNorm(width, eps, form, reader, keeps_rows)
    return RMSNorm(width, eps, reader)


def reads_all(exchange: Exchange | None) -> Reader:
    """Find the reader of sums that returns the stream of all rows. None: of a whole model."""
    return add_rms_norm if exchange is None else exchange.add_rms_norm


def reads_share(exchange: Exchange | None) -> Reader:
    """Find the reader of sums that returns the stream for no other use than the next reader's."""
    return add_rms_norm if exchange is None else exchange.add_to_share


def local_kind(kind: LayerKind, exchange: Exchange | None) -> LayerKind:
    """Give what a rank has of a layer, or all of it."""
    return kind if exchange is None else kind.local(exchange.shard)


class Attention(nn.Module):
    """Self-attention over the paged cache, with a rank's heads.

    kind: of the whole layer. num_in: 2 D in the first layer of an EAGLE-3 draft
    """

    def __init__(
        self,
        kind: LayerKind,
        index: int,
        rope: tuple[Tensor, Tensor],
        num_in: int,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__()
        config = local_kind(kind, exchange)
        H = config.num_heads
        G = config.num_kv_heads
        C = config.head_dim
        D = config.hidden_size
        qkv = (kind.num_heads + 2 * kind.num_kv_heads) * C
        whole = None if exchange is None else (qkv, num_in)
        self.index = index
        self.rope = rope
        self.scale = config.attention_scale
        self.window = config.window
        sinks = torch.empty(H, dtype=torch.float32) if config.has_sinks else None
        self.sinks = None if sinks is None else nn.Parameter(sinks, requires_grad=False)
        self._query_columns = H * C
        forms = kind.forms
        parts = H * C, G * C, G * C
        self.qkv_proj = Linear(
            num_in, sum(parts), config.qkv_bias, whole, forms.qkv_proj, parts=parts
        )
        whole = None if exchange is None else (D, kind.num_heads * C)
        self.o_proj = Linear(H * C, D, config.o_bias, whole, forms.o_proj, exchange)
        self.q_norm = RMSNorm(C, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(C, config.rms_norm_eps) if config.qk_norm else None

    def store(self, x: Tensor | Quantised, has_queries: bool = True) -> Tensor:
        """Cache the keys and values of rows; returns their queries, or anything in their place."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        qkv = self.qkv_proj.sums(x, 0 if has_queries else self._query_columns)
        return store_kv(qkv, self.rope, norms, self.index, has_queries)

    def finish(
        self, q_THC: Tensor, stream_TD: Tensor, rows_X: Tensor | None
    ) -> tuple[Sums, Tensor]:
        """Return what attention adds to the stream, and the stream, of all rows or of some.

        q: as `store` returned it. rows: of which the context says where they are; None: all
        """
        is_picked = rows_X is not None
        if rows_X is not None:
            q_THC, stream_TD = take_rows(q_THC, stream_TD, rows_X)
        out_THC = room_for(q_THC)
        how = self.scale, self.window, self.sinks
        attend(q_THC, out_THC, self.index, is_picked, *how)
        return self.o_proj.sums(out_THC.flatten(1)), stream_TD


class MLP(nn.Module):
    """SwiGLU over one fused gate and up product, with a rank's columns. kind: of the layer."""

    def __init__(self, kind: LayerKind, exchange: Exchange | None = None) -> None:
        super().__init__()
        D = kind.hidden_size
        I = local_kind(kind, exchange).intermediate_size
        forms = kind.forms
        self.gate_up_proj = Linear(D, 2 * I, kind.mlp_bias, form=forms.gate_up_proj, parts=(I, I))
        whole = None if exchange is None else (D, kind.intermediate_size)
        self.down_proj = Linear(I, D, kind.mlp_bias, whole, forms.down_proj, exchange)

    def forward(self, x: Tensor | Quantised) -> Sums:
        return self.down_proj.sums(self.gate_up_proj.gated(x))
