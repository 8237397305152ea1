"""A P-EAGLE head: one pass over rows of masks proposes all drafts after the first.

The extension and the first draft, of the seeds, are those of any EAGLE head (eagle.py). The rows
after a seed embed the mask token and have the mask's feature in place of the target's; each sees
the rows before it (rounds/block_rows.py), and proposes what an EAGLE head's level there would. No
row knows what others propose, and nothing is recycled. So if the number of drafts adapts, fewer
rows propose the first ones of more. One draft needs no masks; an engine that never drafts more
runs the head as an EAGLE head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from graphs.context import ForwardContext, set_forward_context
from graphs.modes import BatchDescriptor, CUDAGraphMode
from specdec.drafts.eagle import EagleDrafter, proposal_of
from specdec.drafts.perturbation import perturbation
from specdec.rounds.block_rows import fill_blocks
from specdec.rounds.propose import propose_levels
from specdec.rounds.step_sizes import Proposal, Step


@dataclass(eq=False, kw_only=True)
class ParallelDrafter(EagleDrafter):
    """Proposes the levels after the first at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._features = torch.zeros_like(self.buffers.block_ids)  # all rows have the mask's

    def propose(self, step: Step) -> None:
        """Write the drafts after the first."""
        how = step.passes.draft_decode
        if how is None:  # one draft is all
            return
        if how.mode is CUDAGraphMode.FULL:
            self.graphs.decode.run_fullgraph(how.descriptor)
        else:
            rows = self.sizes.rows_of_block(step.next_shape.levels)
            masks = self.contexts.block_rows(step.num_reqs, rows, step.max_seq_len + rows, how)
            self._propose_masks(masks, step.num_reqs, step.proposal)

    def _make_propose(self, desc: BatchDescriptor, warmup: bool) -> Callable[[], None]:
        proposal = proposal_of(desc)
        rows = self.sizes.rows_of_block(proposal.block)
        masks = self.contexts.dummy_block_rows(desc, rows, warmup)
        return partial(self._propose_masks, masks, desc.num_tokens, proposal)

    def _propose_masks(self, context: ForwardContext, num_reqs: int, proposal: Proposal) -> None:
        buffers, model, X = self.buffers, self.model, context.num_tokens
        rows_per_req = X // num_reqs
        mask_token = model.config.mask_token_id
        assert mask_token is not None, model.config
        assert model.mask_feature_1D is not None, "set_mask was not called"
        laid_out = num_reqs, rows_per_req, mask_token, self.sizes.max_model_len
        fill_blocks(buffers, self.state, *laid_out)
        rows = buffers.block_ids[:X], model.mask_feature_1D, self._features[:X]
        with set_forward_context(context):
            normed_XD, _ = model.next_level(*rows)
        normed_BKD = normed_XD.view(num_reqs, rows_per_req, -1)
        normed_KBD = normed_BKD.transpose(0, 1).contiguous()
        levels = [self._level(1 + i, num_reqs, proposal) for i in range(len(normed_KBD))]
        draw = partial(perturbation, rule=self.rule) if proposal.is_drawn else None
        propose_levels(normed_KBD, model.lm_head.weight, levels, draw, model.logits_factor)
