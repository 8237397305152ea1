"""The drafter of a checkpoint's kind, over one engine's buffers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafts.block import BlockDrafter
from specdec.drafts.drafter import Drafter
from specdec.drafts.eagle import EagleDrafter
from specdec.drafts.parallel import ParallelDrafter
from specdec.kernels.cut_ids import CutIds
from specdec.models.build import build_block, build_draft
from specdec.models.decoder import DecoderModel
from specdec.parallel.exchange import Exchange
from specdec.passes.contexts import ForwardContexts
from specdec.passes.families import DraftGraphs
from specdec.rounds.buffers import StepBuffers
from specdec.rounds.state import RequestState
from specdec.sizes import EngineSizes
from weights.draft.config import BlockConfig
from weights.load import LoadedEagle


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """What a drafter of any kind works with; calibration and threshold as in rounds/level.py.

    exchange, cut: of a draft that is cut; None: it is whole
    """

    contexts: ForwardContexts
    buffers: StepBuffers
    state: RequestState
    graphs: DraftGraphs
    rule: str
    sizes: EngineSizes
    calibration: Tensor | None
    threshold: Tensor | None
    exchange: Exchange | None
    cut: CutIds | None


def make_drafter(
    draft: LoadedEagle, target: DecoderModel, parts: DraftParts, device: torch.device
) -> Drafter:
    """Build the draft's module around its tensors; the target lends what it lacks."""
    d2t, longest = draft.tensors.get("d2t"), parts.sizes.max_model_len
    if isinstance(draft.config, BlockConfig):
        return BlockDrafter(
            model=build_block(draft, target, longest, device),
            d2t=d2t,
            contexts=parts.contexts,
            buffers=parts.buffers,
            state=parts.state,
            graphs=parts.graphs,
            rule=parts.rule,
            sizes=parts.sizes,
            calibration=parts.calibration,
        )
    # one draft of a parallel head is a level as any other
    kind = ParallelDrafter if parts.sizes.block_rows else EagleDrafter
    return kind(
        model=build_draft(draft, target, longest, device, parts.exchange),
        d2t=d2t,
        contexts=parts.contexts,
        buffers=parts.buffers,
        state=parts.state,
        graphs=parts.graphs,
        rule=parts.rule,
        sizes=parts.sizes,
        calibration=parts.calibration,
        threshold=parts.threshold,
        cut=parts.cut,
    )
