"""Where a vocabulary may be cut for several ranks: no block or tile of a kernel lies on two."""

from specdec.kernels import log_sum_exp, mask_rows
from specdec.kernels.tile_shapes import ALLOWED, THREE_GROUPS
from specdec.sampler import process_logits
from weights.shard import FEWEST_BLOCKS, MOST_IDS, vocabulary_block

COLUMNS = 2048  # of a tile of choose_token, best_children and support_floor, at most


def test_a_block_of_a_large_vocabulary_holds_whole_blocks_of_kernels():
    head = [rows for rows in ALLOWED["block_n"] if rows != THREE_GROUPS]  # not of a head
    for block in (log_sum_exp.BLOCK, mask_rows.BLOCK, process_logits.BLOCK, COLUMNS, *head):
        assert MOST_IDS % block == 0
    assert vocabulary_block(FEWEST_BLOCKS * MOST_IDS) == MOST_IDS
