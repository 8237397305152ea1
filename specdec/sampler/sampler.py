"""What chooses the tokens of a step.

greedy:  the target's best token after each row, found as the head's tiles are computed
exact:   the best token with noise for each row
rejection, block: p/q, by the probabilities of target and draft (accept.py)

In the first two cases a draft is accepted if it equals the target's token: rounds/commit.py
compares them. With p/q `_accept_by_pq` decides here how many drafts are accepted and hands the
number to the commit; target_tokens then holds the accepted drafts and the token drawn after them.
For requests that are not greedy, the head's logits go through processors, floor and noise, kernel
by kernel, only where the requests of the step need them. All of it runs after the target's graph;
greedy choices after all rows of a graph of the target are a graph themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graphs.manager import CudaGraphManager
from graphs.modes import BatchDescriptor
from specdec.kernels.best_token import NOT_FINITE, StopMask, best_token, id_or_marker_ref
from specdec.kernels.block_sums import powers_of, sum_over_ids
from specdec.kernels.choose_token import NoiseKeys, choose_token
from specdec.kernels.cut_ids import CutIds, first_id, greatest_over_ids, num_ids
from specdec.kernels.gumbel import BONUS, COIN, RESIDUAL, TARGET, uniform_ref
from specdec.kernels.mask_rows import mask_rows
from specdec.kernels.support_floor import support_floor
from specdec.kernels.tiles import empty_rows
from specdec.models.decoder import DecoderModel
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.logprobs import (
    ROWS_AT_ONCE,
    RecordedLogprobs,
    StepLogprobs,
    joined,
    logprobs_of,
)
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import Step
from specdec.rounds.upload import uploaded
from specdec.sampler.accept import RULES, Decision, Drafted
from specdec.sampler.count_sampled import count_sampled
from specdec.sampler.process_logits import process_logits
from specdec.sampler.processors import DecidedRows
from specdec.sampler.row_parameters import TextPositions, row_parameters


@dataclass(eq=False)
class Sampler:
    """rule: "exact", "rejection" or "block".

    d2t: the draft's target ids, None: it has the target's.
    cut: the target's ids that this rank has logits of, where others have the rest
    graphs: of greedy choices, by the rows of rounds; None: there are none
    """

    model: DecoderModel
    buffers: StepBuffers
    state: RequestState
    rule: str
    d2t: Tensor | None
    cut: CutIds | None = None
    graphs: CudaGraphManager | None = None
    _raw_TV: Tensor | None = None  # of the step, where a request asks for logprobs

    def choose(self, step: Step) -> None:
        """Choose the token after each decided row, to target_tokens."""
        self._raw_TV = None  # of a step that was out of memory
        how = step.passes.choice
        if how is not None:
            assert self.graphs is not None, how
            self.graphs.run_fullgraph(how.descriptor)
            return
        rows, hidden_TD = self._decided_rows(step)
        out_T = self.buffers.target_tokens[: step.num_decided]
        flags = step.flags
        is_exact = self.rule == "exact"
        if not flags.logits:
            self._choose_best(rows.position_T, rows.state_T, hidden_TD, out_T)
            return
        logits_TV = self.model.logits(hidden_TD)
        self._raw_TV = logits_TV.clone() if flags.logprobs >= 0 else None
        process_logits(logits_TV, rows, self.state, flags, self.cut)
        if step.masks is not None:  # the host has computed them while the forward ran
            row_X, bits_XW = (uploaded(part, logits_TV.device) for part in step.masks())
            mask_rows(logits_TV, self._true_rows(row_X, step), bits_XW, first_id(self.cut))
        # padding within a batch slot draws too, and its token is never read
        places = TextPositions(rows.position_T, rows.start_T)
        limits, noise_keys = row_parameters(
            self.state, rows.state_T, places, 1, TARGET, has_epoch=not is_exact
        )
        floor_T = torch.full_like(logits_TV[:, 0], -torch.inf)
        if flags.floor:
            floor_T = support_floor(logits_TV, limits, self.cut)
        if is_exact:
            choose_token(logits_TV, floor_T, noise_keys, out_T, self.cut)
            return
        if step.parts:  # no draft precedes these rows; those that verify choose below
            choose_token(logits_TV, floor_T, noise_keys._replace(stream=BONUS), out_T, self.cut)
        R = step.num_verify_rows
        if R > 0:
            self._accept_by_pq(logits_TV[:R], floor_T[:R], step.shape.rows, noise_keys.rows(0, R))

    def _choose_best(
        self, position_T: Tensor, state_T: Tensor, hidden_TD: Tensor, out_T: Tensor
    ) -> None:
        """Choose greedily; no logits are written out."""
        mask = StopMask(position_T, state_T, self.state.min_positions, self.state.stop_ids)
        head = hidden_TD, self.model.lm_head.weight, out_T, mask, self.model.logits_factor
        best_token(*head, self.cut)

    def make_choice(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        """Make the choice after rows of padding, to warm up and capture."""
        buffers, T = self.buffers, desc.num_tokens
        buffers.fill_padding([1] * min(T, buffers.sizes.max_num_seqs))
        rows = buffers.positions, buffers.sample_states, buffers.hidden_states
        return partial(self._choose_best, *(each[:T] for each in (*rows, buffers.target_tokens)))

    def record(self, step: Step) -> RecordedLogprobs:
        """Record the step after the commit: token counts; logprobs of sampled and prompt tokens."""
        if step.flags.penalties:
            self._count(step)
        raw_TV, self._raw_TV = self._raw_TV, None
        sampled = None
        if raw_TV is not None:
            kept_TV = raw_TV[self._kept_rows(step)] if step.shape.is_wide else raw_TV
            whole_TV = self._whole(kept_TV)
            sampled = logprobs_of(whole_TV, self._decided_tokens(step), step.flags.logprobs)
        asked = any(part.num_logprobs is not None for part in step.parts)
        return RecordedLogprobs(sampled, self._prompt_logprobs(step) if asked else ())

    def _decided_rows(self, step: Step) -> tuple[DecidedRows, Tensor]:
        buffers = self.buffers
        R = step.num_verify_rows
        S = step.num_decided
        token_T, position_T = (each[:S] for each in (buffers.input_ids, buffers.positions))
        hidden_TD = buffers.hidden_states[:S]
        if R < S:
            last_B = buffers.last_token_indices[step.num_verified : step.num_reqs]
            token_T = torch.cat([token_T[:R], buffers.input_ids[last_B]])
            position_T = torch.cat([position_T[:R], buffers.positions[last_B]])
            room_TD = empty_rows(hidden_TD, *hidden_TD.shape)
            torch.cat([hidden_TD[:R], buffers.hidden_states[last_B]], out=room_TD)
            hidden_TD = room_TD
        rows = DecidedRows(
            state_T=buffers.sample_states[:S],
            token_T=token_T,
            position_T=position_T,
            start_T=buffers.sample_starts[:S],
            longest=step.shape.path_len if R > 0 else 1,
            path_TD=self._paths(R, S) if step.shape.is_wide else None,
        )
        return rows, hidden_TD

    def _paths(self, num_verify_rows: int, num_decided: int) -> Tensor:
        """Return the paths by decided row: of nodes, then of prompts, each of which is a root."""
        R = num_verify_rows
        path_rows = self.buffers.path_rows
        path_TD = path_rows.new_full((num_decided, path_rows.shape[1]), -1)
        path_TD[:R] = path_rows[:R]
        path_TD[R:, 0] = torch.arange(R, num_decided, device=path_TD.device)
        return path_TD

    def _kept_rows(self, step: Step) -> Tensor:
        """List decided rows: of accepted paths, path_len a slot, then those of prompts."""
        R = step.num_verify_rows
        path_BQ = self.buffers.accepted_rows[: step.num_verified, : step.shape.path_len]
        first_B1 = torch.arange(0, R, step.shape.rows, device=path_BQ.device)[:, None]
        of_prompts = torch.arange(R, step.num_decided, device=path_BQ.device)
        return torch.cat([(first_B1 + path_BQ.clamp(min=0)).flatten(), of_prompts])

    def _true_rows(self, row_X: Tensor, step: Step) -> Tensor:
        """Map rows as the host counts them, shape.rows a slot, to where they are; -1: nowhere."""
        if step.shared_rows == 0:
            return row_X
        V = step.num_verified
        Q = step.shape.rows
        starts = self.buffers.verify_start_loc[: V + 1]
        slot_X = (row_X // Q).clamp(max=V - 1)
        at_X = starts[slot_X] + row_X % Q
        at_X = torch.where(at_X < starts[slot_X + 1], at_X, -1)
        return torch.where(row_X < V * Q, at_X, row_X - V * Q + step.shared_rows)

    def _decided_tokens(self, step: Step) -> Tensor:
        """Return what the commit kept, by decided row."""
        V = step.num_verified
        tokens = self.buffers.sampled_tokens
        if step.shared_rows:  # p/q, which keeps other tokens than were chosen, has no such steps
            verified_T = self.buffers.target_tokens[: step.shared_rows]
        else:
            verified_T = tokens[:V, : step.shape.path_len].flatten()
        return torch.cat([verified_T, tokens[V : step.num_reqs, 0]])

    def _count(self, step: Step) -> None:
        buffers = self.buffers
        V = step.num_verified
        B = step.num_reqs
        for here, width in ((slice(0, V), step.shape.path_len), (slice(V, B), 1)):
            if here.start < here.stop:
                tokens_BQ = buffers.sampled_tokens[here, :width]
                accepted_B = buffers.num_accepted[here]
                count_sampled(self.state, buffers.sample_mapping[here], tokens_BQ, accepted_B)

    def _prompt_logprobs(self, step: Step) -> list[StepLogprobs | None]:
        """Compute logprobs of prompt tokens, from the hidden states that the parts left."""
        found: list[StepLogprobs | None] = []
        row = step.num_verify_rows
        for part in step.parts:
            following = part.prompt[part.start + 1 : part.start + part.length + 1]
            if part.num_logprobs is None or not following:
                found.append(None)
            else:
                hidden_XD = self.buffers.hidden_states[row : row + len(following)]
                found.append(self._logprobs_of_rows(hidden_XD, following, part.num_logprobs))
            row += part.length
        return found

    def _logprobs_of_rows(
        self, hidden_XD: Tensor, tokens: Sequence[int], num_top: int
    ) -> StepLogprobs:
        """Compute logprobs of a few rows at a time: the logits of all never exist together."""
        token_X = torch.tensor(tokens, device=hidden_XD.device)
        starts = range(0, len(tokens), ROWS_AT_ONCE)
        pieces = [slice(start, start + ROWS_AT_ONCE) for start in starts]
        found = []
        for x in pieces:
            logits_XV = self._whole(self.model.logits(hidden_XD[x]))
            found.append(logprobs_of(logits_XV, token_X[x], num_top))
        return joined(found)

    def _whole(self, logits_XV: Tensor) -> Tensor:
        """Join the logits of all ids: only logprobs need them in one place."""
        return logits_XV if self.cut is None else self.cut.joined(logits_XV, 1)

    def _accept_by_pq(
        self, logits_TV: Tensor, floor_T: Tensor, query_len: int, noise_keys: NoiseKeys
    ) -> None:
        buffers = self.buffers
        Q = query_len
        B = len(logits_TV) // Q
        drafted = self._drafted(logits_TV.view(B, Q, -1), floor_T, noise_keys.temperatures)
        coins_T = uniform_ref(noise_keys.seeds, noise_keys.positions, COIN, noise_keys.epochs)
        decision = RULES[self.rule](drafted, coins_T.view(B, Q)[:, : Q - 1])
        # a row that is not finite has no mass: no draft holds there, and the round ends in it
        is_finite_BQ = (greatest_over_ids(logits_TV, self.cut) < torch.inf).view(B, Q)
        is_sound_B = is_finite_BQ.gather(1, decision.num_accepted_B[:, None])[:, 0]
        token_B = torch.where(is_sound_B, self._draw(decision, Q), NOT_FINITE)
        draft_BQ = torch.cat([drafted.draft_tokens_BK, token_B[:, None]], dim=1)
        is_accepted_BQ = torch.arange(Q, device=token_B.device) < decision.num_accepted_B[:, None]
        token_BQ = torch.where(is_accepted_BQ, draft_BQ, token_B[:, None])
        buffers.pq_accepted[:B] = decision.num_accepted_B
        buffers.target_tokens[: B * Q] = token_BQ.flatten()

    def _drafted(self, logits_BQV: Tensor, floor_T: Tensor, temperature_T: Tensor) -> Drafted:
        buffers = self.buffers
        (B, Q, V), cut = logits_BQV.shape, self.cut
        logits_TV = logits_BQV.view(B * Q, V)
        row_B = buffers.idx_mapping[:B]
        is_greedy_B11 = (self.state.sampling.temperature[row_B] == 0)[:, None, None]
        draft_BK = buffers.input_ids[: B * Q].view(B, Q)[:, 1:]
        target_TV = probabilities(scaled_in_support(logits_TV, temperature_T, floor_T), cut)
        best_TV = one_hot(id_or_marker_ref(logits_TV, cut), logits_TV, cut)
        target_BQV = torch.where(is_greedy_B11, best_TV.view(B, Q, V), target_TV.view(B, Q, V))
        draft_BKW = probabilities(self.state.draft_scores[row_B, : Q - 1])
        draft_BKV = draft_BKW
        if self.d2t is not None:
            draft_BKV = draft_BKW.new_zeros(B, Q - 1, num_ids(logits_TV, cut))
            draft_BKV.index_copy_(2, self.d2t, draft_BKW)
        draft_BKV = draft_BKV[..., first_id(cut) :][..., :V]
        point_BKV = one_hot(draft_BK, draft_BKV, cut)
        # a draft without a choice is no draw: its token was certain
        is_point_BK1 = is_greedy_B11 | (draft_BKW.sum(dim=-1, keepdim=True) == 0)
        return Drafted(
            target_probs_BQV=target_BQV,
            draft_probs_BKV=torch.where(is_point_BK1, point_BKV, draft_BKV),
            draft_tokens_BK=draft_BK,
            num_drafts_B=(buffers.num_valid[:B] - 1).clamp(min=0),
            cut=cut,
        )

    def _draw(self, decision: Decision, query_len: int) -> Tensor:
        """Draw a token from the weights, with the noise of the stream for its kind."""
        log_weights_BV = decision.weights_BV.log()
        B = len(log_weights_BV)
        row_B = self.buffers.idx_mapping[:B]
        # the kernel reads epochs one after another
        first_B = self.buffers.positions[: B * query_len : query_len].contiguous()
        noise_keys = NoiseKeys(
            temperatures=torch.ones_like(log_weights_BV[:, 0]),
            seeds=self.state.sampling.seeds[row_B],
            positions=first_B + decision.num_accepted_B + 1,
            epochs=first_B,
            stream=RESIDUAL,
        )
        no_floor_B = torch.full_like(log_weights_BV[:, 0], -torch.inf)
        token_B = torch.empty_like(first_B)
        bonus_B = torch.empty_like(first_B)
        of_bonus = noise_keys._replace(stream=BONUS)
        choose_token(log_weights_BV, no_floor_B, noise_keys, token_B, self.cut)
        choose_token(log_weights_BV, no_floor_B, of_bonus, bonus_B, self.cut)
        return torch.where(decision.is_bonus_B, bonus_B, token_B)


def scaled_in_support(logits_TV: Tensor, temperature_T: Tensor, floor_T: Tensor) -> Tensor:
    """Return logits / temperature, -inf below the floor; greedy rows stay as they are."""
    scaled_TV = logits_TV / torch.where(temperature_T == 0, 1, temperature_T)[:, None]
    return torch.where(scaled_TV < floor_T[:, None], -torch.inf, scaled_TV)


def one_hot(id_X: Tensor, like_XV: Tensor, cut: CutIds | None) -> Tensor:
    """Put 1 in the columns of ids; a row has none for a marker or an id of another rank."""
    first = first_id(cut)
    id_V = torch.arange(first, first + like_XV.shape[-1], device=id_X.device)
    return (id_V == id_X[..., None]).to(like_XV.dtype)


def probabilities(scaled_XV: Tensor, cut: CutIds | None = None) -> Tensor:
    """Softmax; zeros where no token is left."""
    powers_XV = powers_of(scaled_XV - greatest_over_ids(scaled_XV, cut))
    return (powers_XV / sum_over_ids(powers_XV, cut)).nan_to_num(0.0)
