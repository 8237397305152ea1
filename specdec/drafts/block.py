"""A block draft (DFlash, DSpark, DFlash2): one pass over a block of rows proposes a round's drafts.

Slot t of its KV holds keys and values of the context row t, a function of tokens 0 to t alone.
`extend` writes them for all rows of a step: a few products and no attention, so in steps with
prompts they are launched op by op. `propose` runs the blocks (rounds/block_rows.py) and chooses the
drafts, the first ones first: a DSpark draft's logits depend on the token before it. Rows of a block
do not see each other's choices else, so all of them get their logits by one product of the head.

In a chain the markov head is applied to candidates, and a selector (DFlash2) to the best of these
(rounds/candidates.py). Under "exact" they are the best of logits + temperature * noise, since the
noise of a draft is known before the draft is. Under p/q a selector's are the best of the logits, so
that drafts have a law, in which no other token is likely; the markov head is applied to all ids.

A row serves all nodes of its depth in a tree: they have its logits, a DSpark draft's after what the
head says of each node, for all ids.

If the number of drafts adapts, a step may run shorter blocks, or none (PLAIN), or draft a tree, of
whose levels each has a row. Chains then have probabilities, with which the confidence head has a
say; a selector's are among its candidates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.drafts.eagle import proposal_of
from specdec.drafts.perturbation import perturbation, perturbation_of_block
from specdec.kernels import use_triton
from specdec.kernels.best_children import Perturbation
from specdec.kernels.best_token import TileMaxima
from specdec.kernels.linear import linear
from specdec.models.block import BlockModel, CandidateSelector, MarkovHead
from specdec.passes.contexts import ForwardContexts
from specdec.passes.families import Captures, DraftGraphs
from specdec.rounds.block_rows import fill_blocks
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.candidates import (
    best_candidates,
    lanes_ref,
    launch_lanes,
    launch_markov_maxima,
    of_all_ids,
)
from specdec.rounds.level import DraftLevel
from specdec.rounds.propose import launch_write_nodes, propose_levels, write_level
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import Proposal, Step
from specdec.sizes import DraftShape, EngineSizes

# what markov_w2 reads, and confidences, by level
Said = Iterator[tuple[Tensor | None, Tensor | None]]


@dataclass(eq=False, kw_only=True)
class BlockDrafter:
    """Reads and writes the step buffers; its proposals end in the state rows.

    d2t: [W] target id of every draft id, or None where the vocabularies are equal
    graphs: as the EAGLE drafter has them; prefill extends the KV alone, decode proposes
    rule: of acceptance. calibration: see rounds/level.py
    """

    model: BlockModel
    d2t: Tensor | None
    contexts: ForwardContexts
    buffers: StepBuffers
    state: RequestState
    graphs: DraftGraphs
    rule: str
    sizes: EngineSizes
    calibration: Tensor | None = None

    def extend(self, step: Step) -> None:
        """Cache the context's keys and values of the step's rows."""
        how = step.passes.draft_prefill
        assert how is not None, step
        if how.mode is CUDAGraphMode.FULL:
            self.graphs.prefill.run_fullgraph(how.descriptor)
        else:
            self._extend(how.descriptor.num_tokens)

    def propose(self, step: Step) -> None:
        """Write all drafts of the round, by blocks of as many rows as these need."""
        how = step.passes.draft_decode
        assert how is not None, step
        if how.mode is CUDAGraphMode.FULL:
            self.graphs.decode.run_fullgraph(how.descriptor)
        else:
            proposal = step.proposal._replace(block=step.next_shape.levels)
            rows = self._rows(step.num_reqs, proposal)
            blocks = self.contexts.block_rows(step.num_reqs, rows, step.max_seq_len + rows, how)
            self._propose(blocks, step.num_reqs, proposal)

    def captures(self) -> Captures:
        """List what is captured, in order."""
        return [(self.graphs.prefill, self._make_extend), (self.graphs.decode, self._make_propose)]

    def _make_extend(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        self.buffers.fill_padding([])
        return partial(self._extend, desc.num_tokens)

    def _make_propose(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        proposal = proposal_of(desc)
        rows = self._rows(desc.num_tokens, proposal)
        blocks = self.contexts.dummy_block_rows(desc, rows, warmup)
        return partial(self._propose, blocks, desc.num_tokens, proposal)

    def _rows(self, num_reqs: int, proposal: Proposal) -> int:
        """Count the rows of a block, which has one for each level of a tree."""
        is_wide = proposal.is_wide
        levels = self.sizes.shape_of(num_reqs, is_wide).levels if is_wide else proposal.block
        return self.sizes.rows_of_block(levels)

    def _extend(self, num_rows: int) -> None:
        buffers = self.buffers
        rows = buffers.positions[:num_rows], buffers.slot_mapping[:num_rows]
        self.model.extend(buffers.features[:num_rows], rows, self.contexts.kv_cache)

    def _propose(self, blocks: ForwardContext, num_reqs: int, proposal: Proposal) -> None:
        """Run the rows of blocks, and write the drafts level by level."""
        is_drawn = proposal.is_drawn
        buffers, model, X = self.buffers, self.model, blocks.num_tokens
        rows = X // num_reqs
        laid_out = num_reqs, rows, model.config.mask_token_id, self.sizes.max_model_len
        fill_blocks(buffers, self.state, *laid_out)
        with set_forward_context(blocks):
            hidden_XD = model(buffers.block_ids[:X])
        # the rows that propose, level by level
        hidden_BRD = hidden_XD.view(num_reqs, rows, -1)
        hidden_KBD = hidden_BRD[:, self.sizes.anchor_rows :].transpose(0, 1).contiguous()
        anchor_B = buffers.block_ids[:X].view(num_reqs, rows)[:, 0]
        if model.candidate_selector is not None:
            self._propose_selected(hidden_KBD, model.candidate_selector, anchor_B, is_drawn)
            return
        shape = self.sizes.shape_of(num_reqs, proposal.is_wide)
        is_chain = not shape.is_wide
        said = self._said(hidden_KBD, anchor_B, shape)
        if model.markov_head is None and is_chain:
            levels = [self._level(i, confidence_B) for i, (_, confidence_B) in enumerate(said)]
            draw = partial(perturbation, rule=self.rule) if is_drawn else None
            propose_levels(hidden_KBD, model.lm_head.weight, levels, draw, model.logits_factor)
            return
        logits_XW = model.logits(hidden_KBD.flatten(0, 1))
        if model.markov_head is not None and is_chain and not self._has_law(is_drawn):
            self._propose_candidates(logits_XW, model.markov_head, said, num_reqs, is_drawn)
            return
        for level in range(len(hidden_KBD)):
            logits_BW = logits_XW[level * num_reqs :][:num_reqs]
            feature_Xr, confidence_X = next(said)
            to = replace(self._level(level, confidence_X), shape=shape)
            self._write(logits_BW, feature_Xr, to, is_drawn)

    def _has_law(self, is_drawn: bool) -> bool:
        """Whether a draft's law is kept, for p/q."""
        return is_drawn and self.rule != "exact"

    def _noise_of_block(self, logits_XW: Tensor, K: int, is_drawn: bool) -> Perturbation | None:
        """Find the noise of the rows of K levels; None: they are greedy, or have a law."""
        if not is_drawn or self._has_law(is_drawn):
            return None
        return perturbation_of_block(self._level(0), logits_XW, K)

    def _propose_candidates(
        self, logits_XW: Tensor, head: MarkovHead, said: Said, B: int, is_drawn: bool
    ) -> None:
        """Write drafts that the markov head chooses among candidates. B: the requests"""
        K = len(logits_XW) // B
        noise = self._noise_of_block(logits_XW, K, is_drawn)
        temperature_B = None if noise is None else noise.noise_keys.temperatures[:B]
        is_gpu, after_Wr = use_triton(logits_XW), head.markov_w2.weight
        found = launch_lanes(logits_XW, noise) if is_gpu else lanes_ref(logits_XW, noise)
        for level in range(K):
            feature_Br, confidence_B = next(said)
            assert feature_Br is not None, "of a markov head"
            of_level = found[level * B :][:B]
            to = self._level(level, confidence_B, temperature_B)
            if is_gpu:
                has_sums = self.calibration is not None
                maxima = launch_markov_maxima(of_level, feature_Br, after_Wr, has_sums)
                launch_write_nodes(maxima, to)
            else:
                bias_BW = linear(feature_Br, after_Wr, out_dtype=of_level.dtype)
                write_level(of_level + bias_BW, to, None)

    def _propose_selected(
        self, hidden_KBD: Tensor, selector: CandidateSelector, token_B: Tensor, is_drawn: bool
    ) -> None:
        """Write drafts that a selector chooses. token: the anchors"""
        hidden_XD, B = hidden_KBD.flatten(0, 1), len(token_B)
        logits_XW = self.model.logits(hidden_XD)
        has_law = self._has_law(is_drawn)
        noise = self._noise_of_block(logits_XW, len(hidden_KBD), is_drawn)
        temperature_B = None if noise is None else noise.noise_keys.temperatures[:B]
        scores_kX, ids_kX = best_candidates(logits_XW, selector.top_k, noise)
        # each candidate is a tile of its own
        sums_kX = torch.ones_like(scores_kX) if self.calibration is not None else None
        projected_Xs = selector.hidden_projection(hidden_XD)
        for level in range(len(hidden_KBD)):
            here = slice(level * B, (level + 1) * B)
            to = self._level(level, temperature_B=temperature_B)
            scores_kB, ids_kB = scores_kX[:, here], ids_kX[:, here]
            selector.add(scores_kB, ids_kB, token_B, projected_Xs[here])
            if use_triton(scores_kB) and not has_law:
                sums_kB = None if sums_kX is None else sums_kX[:, here]
                launch_write_nodes(TileMaxima(scores_kB, ids_kB, sums_kB), to)
            else:
                logits_BW = of_all_ids(scores_kB, ids_kB, logits_XW.shape[1])
                draw = perturbation(to, logits_BW, self.rule) if has_law else None
                write_level(logits_BW, to, draw)
            token_B = self.buffers.draft_last_tokens[:B]

    def _said(self, hidden_KBD: Tensor, token_B: Tensor, shape: DraftShape) -> Said:
        """Yield what markov_w2 reads, and confidences, level by level, of the rows with children.

        Each level is asked for once the tokens before it are written. token: the anchors
        """
        head, confidence_head, state_Xr = self.model.markov_head, self.model.confidence_head, None
        token_X, X = token_B, len(token_B) * shape.width
        has_confidence = self.calibration is not None and not shape.is_wide
        for hidden_BD in hidden_KBD:
            hidden_XD = _spread(hidden_BD, len(token_X))
            e_Xr = feature_Xr = confidence_X = None
            if head is not None:
                e_Xr = head.markov_w1(token_X)
                feature_Xr, state_Xr = head(e_Xr, hidden_XD, state_Xr)
            if confidence_head is not None and has_confidence:
                confidence_X = confidence_head(hidden_XD, e_Xr)
            yield feature_Xr, confidence_X
            token_X = self.buffers.draft_last_tokens[:X]
            if state_Xr is not None and len(token_B) < X:
                state_Xr = state_Xr[self.buffers.candidates.parent_rows[:X]]

    def _write(
        self, logits_BW: Tensor, feature_Xr: Tensor | None, to: DraftLevel, is_drawn: bool
    ) -> None:
        """Write a level's drafts. logits: of the head alone, for all rows of a request"""
        head = self.model.markov_head
        logits_XW = _spread(logits_BW, len(logits_BW) * to.rows_per_req)
        if head is not None and feature_Xr is not None:
            bias = feature_Xr, head.markov_w2.weight
            logits_XW = logits_XW + linear(*bias, out_dtype=logits_XW.dtype)
        write_level(logits_XW, to, perturbation(to, logits_XW, self.rule) if is_drawn else None)

    def _level(
        self,
        level: int,
        confidence_B: Tensor | None = None,
        temperature_B: Tensor | None = None,
    ) -> DraftLevel:
        return DraftLevel(
            buffers=self.buffers,
            state=self.state,
            level=level,
            shape=self.sizes.shape_of(1),
            d2t_W=self.d2t,
            max_model_len=self.sizes.max_model_len,
            calibration=self.calibration,
            confidence_B=confidence_B,
            temperature_B=temperature_B,
        )


def _spread(of_requests: Tensor, num_rows: int) -> Tensor:
    """Repeat what requests have for each of their rows."""
    each = num_rows // len(of_requests)
    return of_requests if each == 1 else of_requests.repeat_interleave(each, dim=0)
