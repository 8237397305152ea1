"""The list of rare kernels is what the steps that are compiled ahead leave out, nothing else."""

from types import SimpleNamespace

import pytest

from specdec.kernels import next_power_of_2
from specdec.kernels.paged_attention import plan_launch
from specdec.kernels.rarities import RARITIES, Rarity
from specdec.start.compile_ahead import ATTENTION_ROWS

BUDGET = 8192  # max_num_batched_tokens


def variant(group: int, G: int, length: int, count: int) -> Rarity:
    """What the attention of a chunk of `count` prompts of at most `length` rows is compiled for."""
    rows = SimpleNamespace(
        max_query_len=length, idx_mapping=range(count), max_seq_len=100, paths=None
    )
    plan = plan_launch(rows, group, G)
    constants = {"GROUP": next_power_of_2(group), "TOKENS": plan.tokens}
    constants |= {"IS_SPLIT": plan.is_split, "IS_UNIFORM": False}
    return Rarity(kernel="_paged_attention_kernel", constants=constants)


def variants(
    group: int, G: int, max_num_seqs: int, lengths: range | tuple[int, ...]
) -> list[Rarity]:
    """Over all numbers of prompts: what one of them needs changes only in one direction."""
    found = []
    for length in lengths:
        most = min(max_num_seqs, BUDGET // length)
        found += [variant(group, G, length, count) for count in {1, most // 2 or 1, most}]
    return found


@pytest.mark.parametrize("group", range(1, 17))
def test_attention_is_compiled_ahead_for_every_chunk_that_is_not_rare(group):
    rare = [rarity for rarity in RARITIES if group in (3, 5)]
    missing = []
    for G in (1, 2, 4, 8, 16, 32):
        if G * group > 128:  # query heads, more than any target has
            continue
        for max_num_seqs in (1, 16, 31, 32, 40, 63, 64, 256, 512, 1000):
            ahead = variants(group, G, max_num_seqs, ATTENTION_ROWS)
            every = variants(group, G, max_num_seqs, range(1, 40))
            missing += [each for each in every if each not in ahead and each not in missing]
    assert missing == [each for each in rare if each.constants["GROUP"] == next_power_of_2(group)]
