"""What a layer of experts asks of its router."""

import pytest
import torch

from graphs.context import ForwardContext, set_forward_context
from specdec.models.attention import AttentionMetadata
from specdec.models.experts import Experts
from weights import ExpertsConfig

D, E, SLOTS = 16, 6, [64, -1, 7, -1, 8]


@pytest.mark.parametrize(
    "rows, is_row",
    [(None, [1, 0, 1, 0, 1]), ([0, 3, 4], [1, 0, 1]), ([2, 10**6, -1], [1, 0, 0])],
)
def test_rows_of_padding_choose_no_expert(monkeypatch, rows, is_row):
    """By their cache slots: all rows of the pass, or those that its last layer finishes."""
    asked = []

    def listen(x_TD, ids_TS, weights_TS, *weights):
        asked.append((ids_TS, weights_TS))

    monkeypatch.setattr("specdec.models.experts.experts_mlp", listen)
    slots = torch.tensor(SLOTS)
    metadata = AttentionMetadata(layer_caches=(), slot_mapping=slots, positions=slots, groups=())
    model = Experts(D, ExpertsConfig(num=E, per_token=2, width=8, renormalise=True))
    torch.nn.init.normal_(model.gate.weight)
    context = ForwardContext(attn_metadata=metadata, slot_mapping=slots, num_tokens=len(slots))
    with set_forward_context(context):
        model(torch.randn(len(is_row), D), None if rows is None else torch.tensor(rows))
    [(ids_TS, weights_TS)] = asked
    assert ((ids_TS < E).all(1) == torch.tensor(is_row)).all()
    assert ((ids_TS == E).all(1) != torch.tensor(is_row)).all()
    assert torch.allclose(weights_TS.sum(1), torch.tensor(is_row).float())
