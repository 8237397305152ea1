"""A number of ranks that does not fit is refused in one line, before any weights are read."""

import dataclasses

import pytest

from tests.weights.formats import FORMATS
from tests.weights.published import save
from tests.weights.tiny import (
    draft_tensors,
    eagle1_config,
    eagle3_config,
    tiny_target,
    write_target,
)
from weights import ExpertsConfig, Shard, load_eagle, load_target
from weights.files.reader import Reader
from weights.ranks import check_draft_ranks, check_target_ranks, possible_ranks

TARGET = tiny_target().config


def changed(vocab_size=96, **changes):
    kind = dataclasses.replace(TARGET.layers[0], **changes)
    return dataclasses.replace(TARGET, layers=(kind,) * 2, vocab_size=vocab_size)


def experts(num):
    return ExpertsConfig(num=num, per_token=2, width=24, renormalise=True)


WIDE = {"num_heads": 32, "num_kv_heads": 8, "intermediate_size": 14336}
REFUSED = {
    "heads": (
        changed(num_heads=14, num_kv_heads=2),
        4,
        "num_attention_heads is 14, no multiple of 4; possible: 1, 2",
    ),
    "kv heads": (
        changed(num_heads=24, num_kv_heads=6),
        4,
        "num_key_value_heads is 6, no multiple or divisor of 4; possible: 1, 2, 3, 6, 12",
    ),
    "the MLP's width": (
        changed(intermediate_size=50),
        4,
        "intermediate_size is 50, no multiple of 4; possible: 1, 2",
    ),
    "experts": (
        changed(**WIDE | {"intermediate_size": 0, "experts": experts(12)}),
        8,
        "num_experts is 12, no multiple of 8; possible: 1, 2, 4",
    ),
    "blocks of ids": (
        changed(**WIDE, vocab_size=4096),
        16,
        "vocab_size is 4096, in 8 blocks, fewer than 16; possible: 1, 2, 4, 8",
    ),
    "several things": (
        TARGET,
        64,
        "num_attention_heads is 4, no multiple of 64; intermediate_size is 48, no multiple of 64; "
        "vocab_size is 96, in 12 blocks, fewer than 64; possible: 1, 2, 4",
    ),
}


@pytest.mark.parametrize(("config", "size", "words"), REFUSED.values(), ids=REFUSED)
def test_a_target_that_cannot_be_cut_is_refused_in_one_line(config, size, words):
    with pytest.raises(ValueError, match=r"^tensor_parallel_size=") as error:
        check_target_ranks(config, size)
    assert str(error.value) == f"tensor_parallel_size={size}: {words}"
    for possible in possible_ranks(config):
        check_target_ranks(config, possible)
        shards = [Shard(rank, possible) for rank in range(possible)]
        rows = [config.local(shard).vocab_size for shard in shards]
        assert sum(rows) == config.vocab_size


def test_dense_layers_and_those_with_experts_give_a_reason_once():
    sparse = dataclasses.replace(TARGET.layers[0], intermediate_size=0, experts=experts(12))
    config = dataclasses.replace(TARGET, layers=(TARGET.layers[0], sparse))
    with pytest.raises(ValueError, match="num_attention_heads") as error:
        check_target_ranks(config, 8)
    assert str(error.value).count("num_attention_heads") == 1


@pytest.mark.parametrize("make", [eagle1_config, eagle3_config])
def test_a_draft_that_cannot_be_cut_can_be_kept_whole(make):
    config = make(tiny_target(), num_heads=6, num_kv_heads=2)
    with pytest.raises(ValueError, match="no multiple of 4") as error:
        check_draft_ranks(config, 4)
    assert str(error.value) == (
        "draft_tensor_parallel_size=4: the draft's num_attention_heads is 6, no multiple of 4; "
        "draft_tensor_parallel_size=1 keeps the draft whole on every rank"
    )


def test_a_small_vocabulary_of_a_draft_is_refused():
    config = eagle3_config(tiny_target(), draft_vocab_size=3)
    with pytest.raises(ValueError, match="draft_vocab_size is 3, in 3 blocks, fewer than 4"):
        check_draft_ranks(config, 4)


def test_loads_refuse_before_they_read(tmp_path, monkeypatch):
    target = tiny_target()
    write_target(tmp_path / "target", target)
    config = eagle1_config(target, num_heads=6, num_kv_heads=2)
    FORMATS["eagle-1"].write(tmp_path / "eagle1", config, draft_tensors(config), target)
    cut = load_target(tmp_path / "target", shard=Shard(0, 4), progress=False)
    monkeypatch.setattr(Reader, "read_bytes", None)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size=3: .*; possible: 1, 2, 4$"):
        load_target(tmp_path / "target", shard=Shard(0, 3), progress=False)
    with pytest.raises(ValueError, match="draft_tensor_parallel_size=1 keeps the draft whole"):
        load_eagle(tmp_path / "eagle1", cut, progress=False, agree=bool)


def test_experts_of_files_are_refused(tmp_path, monkeypatch):
    save("mixtral", tmp_path)
    monkeypatch.setattr(Reader, "read_bytes", None)
    with pytest.raises(ValueError, match="num_experts is 12, no multiple of 8"):
        load_target(tmp_path, shard=Shard(0, 8), progress=False)
