"""Who chooses the tokens of a step, and decides which drafts hold: one place for every rule.

greedy: the target's best token at each row, found as the head's tiles are computed; a draft holds if it equals it.
exact: the same with the noise of each row's place. In both cases stepping/commit.py compares.
rejection, block: the drafts' own probabilities decide (accept.py), and the commit is told how many hold.

Requests that are not greedy take the head's logits through processors, floor and noise, kernel by kernel, and only the
parts that the requests of the step need. All of it runs after the target's graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.best_token import NOT_FINITE, StopMask, best_token
from specdec.kernels.choose_token import NoiseKeys, choose_token
from specdec.kernels.gumbel import BONUS, COIN, RESIDUAL, TARGET, uniform_ref
from specdec.kernels.support_floor.floor import Limits, support_floor
from specdec.models.llama import LlamaModel
from specdec.requests.sampling_flags import SamplingFlags
from specdec.sampler.accept import RULES, Decision, Drafted
from specdec.sampler.count_sampled import count_sampled
from specdec.sampler.process_logits import process_logits
from specdec.sampler.processors import DecidedRows
from specdec.sampler.row_parameters import row_parameters
from specdec.scheduling.work import PromptPart
from specdec.stepping.buffers import StepBuffers
from specdec.stepping.logprobs import (
    ROWS_AT_ONCE,
    RecordedLogprobs,
    StepLogprobs,
    joined,
    logprobs_of,
)
from specdec.stepping.state import RequestState
from specdec.stepping.step_sizes import Step


class Sampler:
    """rule: "exact", "rejection" or "block". d2t: target ids of the draft's, None where they are the same."""

    def __init__(
        self,
        model: LlamaModel,
        buffers: StepBuffers,
        state: RequestState,
        rule: str,
        d2t: Tensor | None,
    ) -> None:
        self.model, self.buffers, self.state, self.rule, self.d2t = model, buffers, state, rule, d2t
        self._raw_TV: Tensor | None = None  # of the step, where logprobs are asked for

    def choose(self, step: Step) -> None:
        """The tokens after the rows that are decided: the last row of each part of a chunk, every row of a round.

        A chunk's go to sampled_tokens, a round's to target_tokens.
        """
        if step.is_chunk:
            self._choose_first(step)
        else:
            self._choose_round(step)

    def record(self, step: Step) -> RecordedLogprobs:
        """After the commit: count what was generated; logprobs of the rows of sampled_tokens and of prompts."""
        if step.flags.penalties:
            self._count(step)
        raw_TV, self._raw_TV = self._raw_TV, None
        sampled = None
        if raw_TV is not None:
            sampled = logprobs_of(raw_TV, self._tokens(step).flatten(), step.flags.logprobs)
        asked = any(part.num_logprobs is not None for part in step.parts)
        return RecordedLogprobs(sampled, self._prompt_logprobs(step.parts) if asked else ())

    def _choose_first(self, step: Step) -> None:
        buffers, B = self.buffers, step.num_reqs
        last_B, row_B = buffers.last_token_indices[:B], buffers.sample_mapping[:B]
        hidden_BD, out_B = buffers.hidden_states[last_B], buffers.sampled_tokens[:B, 0]
        if not step.flags.logits:
            self._choose_best(hidden_BD, buffers.positions[last_B], row_B, out_B)
            return
        rows = DecidedRows(
            row_B=row_B,
            token_BQ=buffers.input_ids[last_B][:, None],
            position_BQ=buffers.positions[last_B][:, None],
            num_valid_B=(row_B >= 0).long(),
        )
        logits_BV = self._logits(hidden_BD, rows, step.flags)
        limits, noise_keys = self._parameters(rows, TARGET if self.rule == "exact" else BONUS)
        choose_token(logits_BV, _floor(logits_BV, limits, step.flags), noise_keys, out_B)

    def _choose_round(self, step: Step) -> None:
        buffers, B, Q = self.buffers, step.num_reqs, _rows_per_slot(step)
        T = B * Q
        row_B, hidden_TD = buffers.idx_mapping[:B], buffers.hidden_states[:T]
        if not step.flags.logits:
            self._choose_best(hidden_TD, buffers.positions[:T], row_B, buffers.target_tokens[:T])
            return
        rows = DecidedRows(
            row_B=row_B,
            token_BQ=buffers.input_ids[:T].view(B, Q),
            position_BQ=buffers.positions[:T].view(B, Q),
            num_valid_B=buffers.num_valid[:B],
        )
        logits_TV = self._logits(hidden_TD, rows, step.flags)
        limits, noise_keys = self._parameters(rows, TARGET)
        floor_T = _floor(logits_TV, limits, step.flags)
        if self.rule == "exact":
            choose_token(logits_TV, floor_T, noise_keys, buffers.target_tokens[:T])
        else:
            self._decide(logits_TV, floor_T, rows, noise_keys)

    def _choose_best(
        self, hidden_TD: Tensor, positions_T: Tensor, row_B: Tensor, out_T: Tensor
    ) -> None:
        """The greedy case: no logits are written out."""
        mask = StopMask(
            positions=positions_T,
            idx_mapping=row_B,
            min_positions=self.state.min_positions,
            stop_ids=self.state.stop_ids,
        )
        best_token(hidden_TD, self.model.lm_head.weight, out_T, mask)

    def _tokens(self, step: Step) -> Tensor:
        return self.buffers.sampled_tokens[: step.num_reqs, : _rows_per_slot(step)]

    def _count(self, step: Step) -> None:
        buffers, B, tokens_BQ = self.buffers, step.num_reqs, self._tokens(step)
        accepted_B = (
            torch.zeros_like(tokens_BQ[:, 0]) if step.is_chunk else buffers.num_accepted[:B]
        )
        count_sampled(self.state, buffers.sample_mapping[:B], tokens_BQ, accepted_B)

    def _prompt_logprobs(self, parts: Sequence[PromptPart]) -> list[StepLogprobs | None]:
        """Logprobs of prompt tokens, from the hidden states that the chunk left, some rows at a time."""
        found: list[StepLogprobs | None] = []
        row = 0
        for part in parts:
            following = part.prompt[part.start + 1 : part.start + part.length + 1]
            pieces = []
            for start in range(
                0, len(following) if part.num_logprobs is not None else 0, ROWS_AT_ONCE
            ):
                hidden = self.buffers.hidden_states[
                    row + start : row + min(start + ROWS_AT_ONCE, len(following))
                ]
                tokens = torch.tensor(following[start : start + ROWS_AT_ONCE], device=hidden.device)
                pieces.append(
                    logprobs_of(self.model.logits(hidden), tokens, part.num_logprobs or 0)
                )
            found.append(joined(pieces) if pieces else None)
            row += part.length
        return found

    def _logits(self, hidden_TD: Tensor, rows: DecidedRows, flags: SamplingFlags) -> Tensor:
        logits_TV = self.model.logits(hidden_TD)
        self._raw_TV = logits_TV.clone() if flags.logprobs >= 0 else None
        process_logits(logits_TV, rows, self.state, flags)
        return logits_TV

    def _parameters(self, rows: DecidedRows, stream: int) -> tuple[Limits, NoiseKeys]:
        # padding within a slot draws too, and nobody reads it
        is_exact = self.rule == "exact"
        return row_parameters(
            self.state, rows.row_B, rows.position_BQ, 1, stream, has_epoch=not is_exact
        )

    def _decide(
        self, logits_TV: Tensor, floor_T: Tensor, rows: DecidedRows, noise_keys: NoiseKeys
    ) -> None:
        buffers, (B, Q) = self.buffers, rows.token_BQ.shape
        drafted = self._drafted(logits_TV, floor_T, rows, noise_keys.temperatures)
        coins_BQ = uniform_ref(
            noise_keys.seeds, noise_keys.positions, COIN, noise_keys.epochs
        ).view(B, Q)
        decision = RULES[self.rule](drafted, coins_BQ[:, : Q - 1])
        # a row that is not finite has no mass, so that no draft holds there and the round ends in it
        is_finite_BQ = (logits_TV.amax(dim=-1) < torch.inf).view(B, Q)
        is_sound_B = is_finite_BQ.gather(1, decision.num_accepted_B[:, None])[:, 0]
        token_B = torch.where(is_sound_B, self._draw(decision, rows), NOT_FINITE)
        buffers.decided[:B] = decision.num_accepted_B
        draft_BQ = torch.cat([drafted.draft_tokens_BK, token_B[:, None]], dim=1)
        is_accepted_BQ = torch.arange(Q, device=token_B.device) < decision.num_accepted_B[:, None]
        buffers.target_tokens[: B * Q] = torch.where(
            is_accepted_BQ, draft_BQ, token_B[:, None]
        ).flatten()

    def _drafted(
        self, logits_TV: Tensor, floor_T: Tensor, rows: DecidedRows, temperature_T: Tensor
    ) -> Drafted:
        sampling, (B, Q), V = self.state.sampling, rows.token_BQ.shape, logits_TV.shape[1]
        is_greedy_B11 = (sampling.temperature[rows.row_B] == 0)[:, None, None]
        draft_BK = rows.token_BQ[:, 1:]
        target_TV = probabilities(scaled_in_support(logits_TV, temperature_T, floor_T))
        best_TV = torch.zeros_like(target_TV).scatter_(1, logits_TV.argmax(dim=-1, keepdim=True), 1)
        best_TV = torch.where(logits_TV.amax(dim=-1, keepdim=True).isfinite(), best_TV, 0)
        draft_BKW = probabilities(self.state.draft_scores[rows.row_B, : Q - 1])
        draft_BKV = draft_BKW
        if self.d2t is not None:
            draft_BKV = torch.zeros(B, Q - 1, V, device=logits_TV.device).index_copy_(
                2, self.d2t, draft_BKW
            )
        point_BKV = torch.zeros_like(draft_BKV).scatter_(2, draft_BK[..., None], 1)
        # a draft without a choice is no draw: its token was certain
        is_point_BK1 = is_greedy_B11 | (draft_BKW.sum(dim=-1, keepdim=True) == 0)
        return Drafted(
            target_probs_BQV=torch.where(
                is_greedy_B11, best_TV.view(B, Q, V), target_TV.view(B, Q, V)
            ),
            draft_probs_BKV=torch.where(is_point_BK1, point_BKV, draft_BKV),
            draft_tokens_BK=draft_BK,
            num_drafts_B=(rows.is_valid_BQ.sum(dim=1) - 1).clamp(min=0),
        )

    def _draw(self, decision: Decision, rows: DecidedRows) -> Tensor:
        """A token from the weights, by noise of the stream that says what it is."""
        sampling, row_B = self.state.sampling, rows.row_B
        log_weights_BV = decision.weights_BV.log()
        token_B, bonus_B = torch.empty_like(row_B), torch.empty_like(row_B)
        for stream, out_B in ((RESIDUAL, token_B), (BONUS, bonus_B)):
            noise_keys = NoiseKeys(
                temperatures=torch.ones_like(log_weights_BV[:, 0]),
                seeds=sampling.seeds[row_B],
                positions=rows.position_BQ[:, 0] + decision.num_accepted_B + 1,
                epochs=rows.position_BQ[:, 0],
                stream=stream,
            )
            choose_token(
                log_weights_BV, torch.full_like(log_weights_BV[:, 0], -torch.inf), noise_keys, out_B
            )
        return torch.where(decision.is_bonus_B, bonus_B, token_B)


def _floor(logits_TV: Tensor, limits: Limits, flags: SamplingFlags) -> Tensor:
    return (
        support_floor(logits_TV, limits)
        if flags.floor
        else torch.full_like(logits_TV[:, 0], -torch.inf)
    )


def _rows_per_slot(step: Step) -> int:
    """Rows of each batch slot that are decided: all of a round, the last one of a chunk."""
    return step.query_len or 1


def scaled_in_support(logits_TV: Tensor, temperature_T: Tensor, floor_T: Tensor) -> Tensor:
    """logits / temperature, -inf below the floor; greedy rows as they are."""
    scaled_TV = logits_TV / torch.where(temperature_T == 0, 1, temperature_T)[:, None]
    return torch.where(scaled_TV < floor_T[:, None], -torch.inf, scaled_TV)


def probabilities(scaled_XV: Tensor) -> Tensor:
    """Softmax; zeros where no token is left."""
    return scaled_XV.softmax(dim=-1).nan_to_num(0.0)
