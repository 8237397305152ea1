"""The best tokens of a row do not depend on how many are asked for, nor on the other rows."""

import pytest
import torch

from specdec.rounds.logprobs import ROWS_RANKED, logprobs_of

VOCAB_SIZE = 300


@pytest.mark.parametrize("num_rows", [1, ROWS_RANKED + 5])
def test_of_equal_logits_the_lowest_ids_come_first(num_rows):
    torch.manual_seed(0)
    logits = torch.randn(num_rows, VOCAB_SIZE)
    logits[:, 100:200] = 9.0
    chosen = torch.full((num_rows,), 150)
    for num_top in (1, 3, 20, 100):
        found = logprobs_of(logits, chosen, num_top)
        assert (found.top_ids_XN == torch.arange(100, 100 + num_top)).all()
        assert (found.rank_X == 1).all()
    whole = logprobs_of(logits, chosen, VOCAB_SIZE + 1)
    assert torch.equal(whole.top_ids_XN.sort().values[0], torch.arange(VOCAB_SIZE))
    close = logits.log_softmax(-1).sort(descending=True).values
    torch.testing.assert_close(whole.top_XN, close)
