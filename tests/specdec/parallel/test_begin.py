"""What no ranks can be started for is one line, before anything is read."""

import logging
from dataclasses import replace

import pytest
import torch

from specdec import LLM
from specdec.config import EngineConfig
from specdec.parallel import begin
from specdec.parallel.begin import check_ranks
from specdec.parallel.equal_bits import Fit
from specdec.speculative_config import SpeculativeConfig
from specdec.start import load, runners
from specdec.start.speculation import Drafting
from weights.demo import demo_directory

CUDA = torch.device("cuda")


@pytest.fixture
def gpus(monkeypatch):
    """gpus(names, apart): GPUs that torch sees; those pairs do not reach each other."""

    def see(names, apart=()):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
        reaches = lambda one, other: (one, other) not in apart  # noqa: E731
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return see


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2", None])
def test_a_number_of_ranks_is_an_integer_of_at_least_1(size):
    with pytest.raises(ValueError, match=f"tensor_parallel_size={size!r}: give an integer from 1"):
        EngineConfig(tensor_parallel_size=size)


@pytest.mark.parametrize(
    "count, visible, message",
    [
        (2, None, "tensor_parallel_size=4: torch sees 2 GPUs here: give at most 2"),
        (1, "5", r"=4: torch sees one GPU here \(CUDA_VISIBLE_DEVICES=5\): give at most 1"),
    ],
)
def test_there_are_no_more_ranks_than_gpus(gpus, monkeypatch, count, visible, message):
    gpus(["H100"] * count)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=message):
        check_ranks(CUDA, 4)


@pytest.mark.parametrize("pair", [(0, 2), (2, 0)])
def test_every_pair_of_gpus_has_a_link(gpus, pair):
    gpus(["H100"] * 3, apart=[pair])
    with pytest.raises(ValueError, match="=3: GPUs 0 and 2 cannot reach each other's memory"):
        check_ranks(CUDA, 3)
    assert check_ranks(CUDA, 2) == "cuda:0"


def test_gpus_of_different_kinds_are_a_warning(gpus, caplog):
    gpus(["H100", "H100", "A100"])
    with caplog.at_level(logging.WARNING, "specdec"):
        assert check_ranks(CUDA, 2) == "cuda:0"
        assert caplog.text == ""
        assert check_ranks(CUDA, 3) == "cuda:0"
    assert "GPUs differ (H100, H100, A100): the slowest sets the pace" in caplog.text


def test_one_gpu_cannot_be_named(gpus):
    gpus(["H100"] * 2)
    with pytest.raises(ValueError, match="device='cuda:1' with tensor_parallel_size=2: ranks take"):
        check_ranks(torch.device("cuda:1"), 2)


def test_refusals_come_before_anything_is_read(gpus, monkeypatch):
    gpus(["H100"])
    monkeypatch.setattr(load, "Reader", lambda *_: pytest.fail("files were read"))
    with pytest.raises(ValueError, match="torch sees one GPU here: give at most 1"):
        LLM("demo", device="cuda", tensor_parallel_size=2)


@pytest.mark.parametrize(
    "target, draft, size, words",
    [
        (
            "demo",
            None,
            3,
            "tensor_parallel_size=3: num_attention_heads is 4, .*; possible: 1, 2, 4",
        ),
        ("demo-experts", None, 8, "tensor_parallel_size=8: num_attention_heads is 4, no multiple"),
        ("demo", {"draft_tensor_parallel_size": 4}, 2, "=4 with tensor_parallel_size=2: give 1, "),
        ("demo", {"method": "eagle"}, 2, "an eagle3 draft .*; give method='auto'"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_a_rank_starts(
    monkeypatch, target, draft, size, words
):
    monkeypatch.setattr(begin, "Processes", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr(runners, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    draft = None if draft is None else {"model": target, **draft}
    with pytest.raises(ValueError, match=words) as refused:
        LLM(target, draft, device="cpu", tensor_parallel_size=size)
    assert "\n" not in str(refused.value)


def test_a_draft_that_cannot_be_cut_may_stay_whole(monkeypatch):
    """Its heads are as many as the target's, so another number is made up here."""
    real = load.bind_eagle

    def with_odd_heads(*given):
        found, d2t = real(*given)
        layer = replace(found.config.layer, num_heads=3)
        return replace(found, config=replace(found.config, layer=layer)), d2t

    monkeypatch.setattr(load, "bind_eagle", with_odd_heads)
    monkeypatch.setattr(load, "leading", lambda *_: pytest.fail("ranks begin"))
    options = {"device": "cpu", "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match=r"draft's num_attention_heads is 3, .*_size=1 keeps"):
        LLM("demo", {"model": "demo"}, **options)
    with pytest.raises(pytest.fail.Exception, match="ranks begin"):
        LLM("demo", {"model": "demo", "draft_tensor_parallel_size": 1}, **options)


@pytest.fixture
def drafts(monkeypatch):
    """drafts(width, **options): check parts of a draft whose MLP has this width, for two ranks."""
    real = load.bind_eagle

    def check(width, **options):
        def with_width(*given):
            found, d2t = real(*given)
            layer = replace(found.config.layer, intermediate_size=width)
            return replace(found, config=replace(found.config, layer=layer)), d2t

        monkeypatch.setattr(load, "bind_eagle", with_width)
        speculation = SpeculativeConfig("demo", 3, **options)
        pair = demo_directory("target"), demo_directory("eagle3")
        load.check_parts(begin.Found(*pair, speculation, Drafting(3)), 2)

    return check


def test_columns_of_a_drafts_part_end_at_16_bytes(drafts):
    with pytest.raises(ValueError, match=r"draft's 1,004 columns of down_proj .*_size=1 keeps"):
        drafts(1004)
    drafts(1004, draft_tensor_parallel_size=1)


def test_other_bits_of_a_draft_matter_where_its_probabilities_do(drafts, caplog):
    drafts(1040)
    drafts(1040, acceptance="block", draft_tensor_parallel_size=1)
    assert caplog.messages == []
    drafts(1040, acceptance="block")
    assert ["acceptance='block': tokens may differ" in each for each in caplog.messages] == [True]


@pytest.mark.parametrize("reason, said", [("", ""), ("o_proj has 1 split", "o_proj has 1 split")])
def test_numbers_of_gpus_with_other_bits_are_a_warning(monkeypatch, caplog, reason, said):
    bits = "other" if reason else "equal"
    monkeypatch.setattr(load, "fit_of", lambda _, size: Fit(size, bits, reason))
    load.check_parts(begin.Found(demo_directory("target"), None, None, Drafting(0)), 2)
    assert [each.split("one GPU: ")[1] for each in caplog.messages] == [said] * bool(said)


@pytest.mark.parametrize("backend", ["ray", "external_launcher", 1])
def test_ranks_are_processes_of_this_host(backend):
    assert EngineConfig(distributed_executor_backend="mp").distributed_executor_backend == "mp"
    with pytest.raises(ValueError, match="distributed_executor_backend"):
        EngineConfig(distributed_executor_backend=backend)
