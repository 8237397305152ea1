"""A block draft (DFlash, DSpark, DFlash2): one pass over a block of rows proposes a round's drafts.

Slot t of its KV holds keys and values of the context row t, a function of tokens 0 to t alone.
`extend` writes them for all rows of a step: a few products and no attention, so in steps with
prompts they are launched op by op. `propose` runs the blocks (rounds/block_rows.py) and chooses the
drafts, the first ones first: a DSpark draft's logits depend on the token before it. Rows of a block
do not see each other's choices else, so all of them get their logits by one product of the head.

The markov head is applied to all ids. Greedy drafts are the best over its tiles, to which what the
head says is added; where drafts are drawn, their logits are written.

A selector (DFlash2) is applied to the best tokens of each row alone. Under "exact" these are the
best of logits + temperature * noise, since the noise of a draft is known before the draft is. Under
p/q they are the best of the logits, so that drafts have a law, in which no other token is likely.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.drafts.perturbation import perturbation, perturbation_of_block
from specdec.kernels import use_triton
from specdec.kernels.best_token import TileMaxima, launch_tile_maxima
from specdec.kernels.linear import linear
from specdec.models.block import BlockModel, CandidateSelector, MarkovHead
from specdec.passes.contexts import ForwardContexts
from specdec.passes.families import Captures, DraftGraphs
from specdec.rounds.block_rows import fill_blocks
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.candidates import best_candidates, of_all_ids
from specdec.rounds.level import DraftLevel
from specdec.rounds.propose import launch_write_nodes, propose_levels, write_level
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import Proposal, Step
from specdec.sizes import EngineSizes, chain


@dataclass(eq=False, kw_only=True)
class BlockDrafter:
    """Reads and writes the step buffers; its proposals end in the state rows.

    d2t: [W] target id of every draft id, or None where the vocabularies are equal
    graphs: as the EAGLE drafter has them; prefill extends the KV alone, decode proposes
    rule: of acceptance
    """

    model: BlockModel
    d2t: Tensor | None
    contexts: ForwardContexts
    buffers: StepBuffers
    state: RequestState
    graphs: DraftGraphs
    rule: str
    sizes: EngineSizes

    def extend(self, step: Step) -> None:
        """Cache the context's keys and values of the step's rows."""
        how = step.passes.draft_prefill
        assert how is not None, step
        if how.mode is CUDAGraphMode.FULL:
            self.graphs.prefill.run_fullgraph(how.descriptor)
        else:
            self._extend(how.descriptor.num_tokens)

    def propose(self, step: Step) -> None:
        """Write all drafts of the round."""
        how = step.passes.draft_decode
        assert how is not None, step
        if how.mode is CUDAGraphMode.FULL:
            self.graphs.decode.run_fullgraph(how.descriptor)
        else:
            most = step.max_seq_len + self.sizes.block_rows
            blocks = self.contexts.block_rows(step.num_reqs, most, how)
            self._propose(blocks, step.num_reqs, step.proposal.is_drawn)

    def captures(self) -> Captures:
        """List what is captured, in order."""
        return [(self.graphs.prefill, self._make_extend), (self.graphs.decode, self._make_propose)]

    def _make_extend(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        self.buffers.fill_padding([])
        return partial(self._extend, desc.num_tokens)

    def _make_propose(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        assert isinstance(desc.kind, Proposal), desc
        blocks = self.contexts.dummy_block_rows(desc, warmup)
        return partial(self._propose, blocks, desc.num_tokens, desc.kind.is_drawn)

    def _extend(self, num_rows: int) -> None:
        buffers = self.buffers
        rows = buffers.positions[:num_rows], buffers.slot_mapping[:num_rows]
        self.model.extend(buffers.features[:num_rows], rows, self.contexts.kv_cache)

    def _propose(self, blocks: ForwardContext, num_reqs: int, is_drawn: bool) -> None:
        """Run the rows of blocks, and write the drafts level by level."""
        buffers, model = self.buffers, self.model
        mask_token = model.config.mask_token_id
        fill_blocks(buffers, self.state, num_reqs, mask_token, self.sizes.max_model_len)
        with set_forward_context(blocks):
            hidden_XD = model(buffers.block_ids[: blocks.num_tokens])
        # the rows that propose, level by level
        hidden_BRD = hidden_XD.view(num_reqs, self.sizes.block_rows, -1)
        hidden_KBD = hidden_BRD[:, self.sizes.anchor_rows :].transpose(0, 1).contiguous()
        levels = [self._level(level) for level in range(len(hidden_KBD))]
        if model.candidate_selector is not None:
            self._propose_selected(hidden_KBD, model.candidate_selector, is_drawn)
            return
        if model.markov_head is not None:
            self._propose_in_turn(model.markov_head, hidden_KBD, levels, is_drawn)
            return
        draw = partial(perturbation, rule=self.rule) if is_drawn else None
        propose_levels(hidden_KBD, model.lm_head.weight, levels, draw, model.logits_factor)

    def _propose_selected(
        self, hidden_KBD: Tensor, selector: CandidateSelector, is_drawn: bool
    ) -> None:
        """Write drafts that a selector chooses."""
        hidden_XD, B = hidden_KBD.flatten(0, 1), hidden_KBD.shape[1]
        logits_XW = self.model.logits(hidden_XD)
        has_law = is_drawn and self.rule != "exact"
        noise = None
        if is_drawn and not has_law:
            noise = perturbation_of_block(self._level(0), logits_XW)
        scores_kX, ids_kX = best_candidates(logits_XW, selector.top_k, noise)
        projected_Xs = selector.hidden_projection(hidden_XD)
        token_B = self._anchors(B)
        for level in range(len(hidden_KBD)):
            here, to = slice(level * B, (level + 1) * B), self._level(level)
            scores_kB, ids_kB = scores_kX[:, here], ids_kX[:, here]
            selector.add(scores_kB, ids_kB, token_B, projected_Xs[here])
            if use_triton(scores_kB) and not has_law:
                launch_write_nodes(TileMaxima(scores_kB, ids_kB), to)  # each is a tile of its own
            else:
                logits_BW = of_all_ids(scores_kB, ids_kB, logits_XW.shape[1])
                draw = perturbation(to, logits_BW, self.rule) if has_law else None
                write_level(logits_BW, to, draw)
            token_B = self.buffers.draft_last_tokens[:B]

    def _anchors(self, num_reqs: int) -> Tensor:
        """List the last sampled tokens of the batch slots."""
        return self.buffers.block_ids.view(-1, self.sizes.block_rows)[:num_reqs, 0]

    def _propose_in_turn(
        self, head: MarkovHead, hidden_KBD: Tensor, levels: Sequence[DraftLevel], is_drawn: bool
    ) -> None:
        """Write level after level, since the logits of each depend on the token before it."""
        _, B, _ = hidden_KBD.shape
        logits_XW = self.model.logits(hidden_KBD.flatten(0, 1))
        token_B = self._anchors(B)
        state_Br = None
        logits_KBW = logits_XW.view(len(levels), B, -1)
        for hidden_BD, logits_BW, to in zip(hidden_KBD, logits_KBW, levels, strict=True):
            feature_Br, state_Br = head(token_B, hidden_BD, state_Br)
            self._write(logits_BW, (feature_Br, head.markov_w2.weight), to, is_drawn)
            token_B = self.buffers.draft_last_tokens[:B]

    def _write(
        self, logits_BW: Tensor, bias: tuple[Tensor, Tensor], to: DraftLevel, is_drawn: bool
    ) -> None:
        """Write a level's drafts. bias: factors of what is added to the head's logits"""
        if not is_drawn and use_triton(logits_BW):
            launch_write_nodes(launch_tile_maxima(*bias, addend_TV=logits_BW), to)
            return
        logits_BW = logits_BW + linear(*bias, out_dtype=logits_BW.dtype)
        write_level(logits_BW, to, perturbation(to, logits_BW, self.rule) if is_drawn else None)

    def _level(self, level: int) -> DraftLevel:
        return DraftLevel(
            buffers=self.buffers,
            state=self.state,
            level=level,
            shape=chain(self.sizes.num_speculative_tokens),
            d2t_W=self.d2t,
            max_model_len=self.sizes.max_model_len,
        )
