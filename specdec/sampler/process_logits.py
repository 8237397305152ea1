"""What changes the logits before a token is chosen, on the GPU: over all, then forbidden ids.

The rules, their order and their rounding are those of processors.py, whose `process` is the twin.
A forbidden id's logit becomes -inf, which no penalty changes, so ids are forbidden last, and their
kernel runs alone where no other rule is asked for. The drafts before a row count as generated;
of nodes with siblings, those on the row's path.
"""

from torch import Tensor

from specdec.kernels import jit, launch_options, tl, use_triton
from specdec.kernels.cut_ids import CutIds, first_id
from specdec.kernels.overlap import begin
from specdec.requests.params import SamplingFlags
from specdec.rounds.state import RequestState
from specdec.sampler.processors import DecidedRows, process

BLOCK = 2048


def process_logits(
    logits_TV: Tensor,
    rows: DecidedRows,
    state: RequestState,
    flags: SamplingFlags,
    cut: CutIds | None = None,
) -> None:
    """Apply what the step needs to its logits, in place. cut: the ids of the columns."""
    if not use_triton(logits_TV):
        process(logits_TV, rows, state, flags, cut)
        return
    sampling = state.sampling
    has_paths = rows.path_TD is not None
    path_TD = rows.token_T[:, None] if rows.path_TD is None else rows.path_TD
    T, V = logits_TV.shape
    stride, R, first = logits_TV.stride(0), len(sampling.floats) - 1, first_id(cut)
    if flags.bias or flags.penalties:
        by_token = sampling.bias, sampling.in_prompt, sampling.output_counts
        _weights_kernel[(-(-V // BLOCK), T)](
            *(logits_TV, rows.state_T, rows.start_T, rows.token_T, sampling.floats, *by_token),
            *(path_TD, path_TD.shape[1], sampling.floats.stride(0), stride),
            *(sampling.bias.stride(0), R, V, first),
            HAS_PATHS=has_paths,
            HAS_BIAS=flags.bias,
            HAS_PENALTIES=flags.penalties,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options(logits_TV),
        )
    of_rows = rows.state_T, rows.start_T, rows.token_T, rows.position_T
    stops = state.min_positions, state.stop_ids
    words = sampling.bad_words, sampling.bad_lengths
    sizes = path_TD.shape[1], sampling.integers.stride(0), stride, R, sampling.history.shape[1]
    columns = V, first
    _forbid_kernel[(T,)](
        *(logits_TV, sampling.history, *of_rows, *stops, *words, sampling.integers, path_TD),
        *(*sizes, *columns),
        HAS_PATHS=has_paths,
        STOP_IDS=state.stop_ids.shape[1],
        HAS_WORDS=flags.bad_words,
        WORDS=sampling.bad_words.shape[1],
        LENGTH=sampling.bad_words.shape[2],
        num_warps=1,
        **launch_options(logits_TV),
    )


@jit
def _weights_kernel(
    logits_ptr,  # [T, V] float32
    states_ptr,  # [T]
    starts_ptr,  # [T]
    tokens_ptr,  # [T]
    floats_ptr,  # [R + 1, 6] from the fourth: presence, frequency, repetition
    bias_ptr,  # [R + 1, V] float32
    in_prompt_ptr,  # [R + 1, V] bool
    counts_ptr,  # [R + 1, V] int32
    paths_ptr,  # [T, D1] rows by depth, -1 after them, with HAS_PATHS
    D1,
    stride_floats,
    stride_logits,
    stride_ids,
    R,
    V,
    first,  # id of the first column
    HAS_PATHS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tile = tl.program_id(0)
    t = tl.program_id(1)
    row = _state_row(t, states_ptr, R)
    column = first + tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < first + V
    at = row.to(tl.int64) * stride_ids + column
    out_ptr = logits_ptr + t.to(tl.int64) * stride_logits - first + column
    x = tl.load(out_ptr, mask=inside, other=0.0)
    if HAS_BIAS:
        x = x + tl.load(bias_ptr + at, mask=inside, other=0.0)
    if HAS_PENALTIES:
        presence = tl.load(floats_ptr + row * stride_floats + 3)
        frequency = tl.load(floats_ptr + row * stride_floats + 4)
        repetition = tl.load(floats_ptr + row * stride_floats + 5)
        if (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0):
            count = tl.load(counts_ptr + at, mask=inside, other=0)
            if HAS_PATHS:
                for depth in range(1, D1):  # not the root
                    node = tl.load(paths_ptr + t * D1 + depth)
                    token = tl.load(tokens_ptr + node, mask=node >= 0, other=-1)
                    count += (column == token).to(tl.int32)
            else:
                for draft in range(tl.load(starts_ptr + t) + 1, t + 1):
                    count += (column == tl.load(tokens_ptr + draft)).to(tl.int32)
            in_prompt = tl.load(in_prompt_ptr + at, mask=inside, other=0).to(tl.int32) != 0
            is_known = in_prompt | (count > 0)
            weaker = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = tl.where(is_known, weaker, x)
            x = x - frequency * count.to(tl.float32)
            x = x - presence * (count > 0).to(tl.float32)
    tl.store(out_ptr, x, mask=inside)


@jit
def _forbid_kernel(
    logits_ptr,  # [T, V] float32
    history_ptr,  # [R + 1, N] the rows' own tokens are written
    states_ptr,  # [T]
    starts_ptr,  # [T]
    tokens_ptr,  # [T]
    positions_ptr,  # [T]
    min_positions_ptr,  # [R + 1]
    stop_ids_ptr,  # [R + 1, STOP_IDS]
    words_ptr,  # [R + 1, WORDS, LENGTH] each ends in the last column
    lengths_ptr,  # [R + 1, WORDS]
    integers_ptr,  # [R + 1, 4] the last one: tokens of the prompt
    paths_ptr,  # [T, D1] rows by depth, -1 after them, with HAS_PATHS
    D1,
    stride_integers,
    stride_logits,
    R,
    N,
    V,
    first_id,  # of the columns
    HAS_PATHS: tl.constexpr,
    STOP_IDS: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    t = tl.program_id(0)
    row = _state_row(t, states_ptr, R)
    row_ptr = logits_ptr + t.to(tl.int64) * stride_logits
    position = tl.load(positions_ptr + t)
    if position + 1 < tl.load(min_positions_ptr + row):
        stop_ids = tl.load(stop_ids_ptr + row * STOP_IDS + tl.arange(0, STOP_IDS))
        _forbid(row_ptr, stop_ids - first_id, tl.full((STOP_IDS,), 1, tl.int1), V)
    if HAS_WORDS:
        # the words that lack only their last token after row t, whose own goes to the history; of
        # rows with paths only the root's does
        start = tl.load(starts_ptr + t)
        is_kept = row < R
        if HAS_PATHS:
            is_kept = is_kept & (start == t)
        if is_kept:
            tl.store(history_ptr + row * N + position, tl.load(tokens_ptr + t))
        j = tl.arange(0, LENGTH)
        # the tokens before the drawn one, which is in the last column
        place = position - (LENGTH - 2) + j
        first = tl.load(positions_ptr + start)
        num_prompt_tokens = tl.load(integers_ptr + row * stride_integers + 3)
        is_generated = (place >= num_prompt_tokens) & (j < LENGTH - 1)
        is_own = is_generated & (place >= first)
        own_row = start + (place - first)
        if HAS_PATHS:
            own_row = tl.load(paths_ptr + t * D1 + (place - first), mask=is_own, other=-1)
        own = tl.load(tokens_ptr + own_row, mask=is_own & (own_row >= 0), other=-1)
        is_earlier = is_generated & (place < first)
        earlier = tl.load(history_ptr + row * N + place, mask=is_earlier, other=-1)
        before = tl.where(is_own, own, earlier)
        word = row * WORDS + tl.arange(0, WORDS)
        length = tl.load(lengths_ptr + word)
        tokens = tl.load(words_ptr + word[:, None] * LENGTH + j[None, :])
        is_open = (j[None, :] < LENGTH - length[:, None]) | (j[None, :] == LENGTH - 1)
        is_next = tl.min(((tokens == before[None, :]) | is_open).to(tl.int32), axis=1) > 0
        is_next &= length > 0
        _forbid(row_ptr, tl.load(words_ptr + word * LENGTH + LENGTH - 1) - first_id, is_next, V)


@jit
def _state_row(t, states_ptr, R):
    """Find the state row of a decided row; the scratch row R for padding."""
    idx = tl.load(states_ptr + t)
    return tl.where(idx < 0, R, idx)


@jit
def _forbid(row_ptr, columns, is_out, V):
    is_out = is_out & (columns >= 0) & (columns < V)
    # added, so that NaN stays NaN
    x = tl.load(row_ptr + columns, mask=is_out, other=0.0)
    tl.store(row_ptr + columns, x + float("-inf"), mask=is_out)
