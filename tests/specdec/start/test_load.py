"""A name and a config.json that ask for too much are refused before anything large is built."""

import dataclasses
import json
import shutil
import time

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.requests.tokenizer import Tokenizer
from specdec.sizes import MAX_STOP_IDS, EngineSizes
from specdec.start.load import _tokenizers_eos
from specdec.start.locate import locate
from specdec.start.sizing import check_forms, check_heads, check_length
from tests.weights.tiny import LAYER, tiny_target
from weights import CheckpointError, demo_directory
from weights.config import Forms


@pytest.fixture
def target(tmp_path):
    """target(max_position_embeddings=...): the bundled target, other keys in its config.json."""

    def write(**changes):
        shutil.copytree(demo_directory("target"), tmp_path, dirs_exist_ok=True)
        keys = json.loads((tmp_path / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(keys))
        return tmp_path

    return write


@pytest.mark.parametrize("length", [10**8, 10**9, 2**31 - 1])
def test_a_length_beyond_every_engine_asks_for_max_model_len(target, length):
    start = time.perf_counter()
    with pytest.raises(
        CheckpointError,
        match=rf"config\.json: .* max_position_embeddings={length} .* "
        "give a max_model_len of at most 16777",
    ):
        LLM(str(target(max_position_embeddings=length)), device="cpu")
    assert time.perf_counter() - start < 10


def test_a_length_that_no_memory_holds_asks_for_max_model_len(target, monkeypatch):
    monkeypatch.setattr("specdec.start.runners.device_memory", lambda device: 16 << 30)
    start = time.perf_counter()
    with pytest.raises(
        ValueError,
        match=r"=10000000, the .* longest: .* 76.29 GiB, the device has 16.00 GiB: give a max_mod",
    ):
        LLM(str(target(max_position_embeddings=10**7)), device="cpu")
    assert time.perf_counter() - start < 10


def test_a_given_max_model_len_is_all_that_is_built(target):
    start = time.perf_counter()
    llm = LLM(
        str(target(max_position_embeddings=2**31 - 1)),
        device="cpu",
        max_model_len=64,
        max_num_seqs=2,
    )
    assert llm.sizes.max_model_len == 64
    plain = LLM("demo", device="cpu", max_model_len=64, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    texts = [
        each.generate([[0, 5, 9]], params, use_tqdm=False)[0].outputs[0].token_ids
        for each in (llm, plain)
    ]
    assert texts[0] == texts[1]
    assert time.perf_counter() - start < 60


def test_the_longest_length_named_is_one_that_fits():
    sizes = EngineSizes(
        max_model_len=1000,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        num_kv_blocks=16,
        num_speculative_tokens=0,
    )
    with pytest.raises(ValueError, match=r"a max_model_len of at most 960$"):
        check_length(sizes, block=100, memory=1599)
    check_length(sizes, block=100, memory=1600)


def test_heads_that_no_gpu_has_room_for_name_the_widest():
    gpu = torch.device("cuda")
    for head_dim, dtype in ((512, torch.bfloat16), (256, torch.float32), (96, torch.float16)):
        check_heads("draft", LAYER.heads._replace(head_dim=head_dim), dtype, gpu)
    wide = LAYER.heads._replace(head_dim=514)
    check_heads("target", wide, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"the draft's head_dim=514: .* at most 512 in torch\.bfl"):
        check_heads("draft", wide, torch.bfloat16, gpu)
    with pytest.raises(ValueError, match="at most 256 in"):
        check_heads("target", wide, torch.float32, gpu)


def test_fp8_on_an_older_gpu_or_in_odd_widths_is_refused(monkeypatch):
    gpu, forms = torch.device("cuda"), Forms("fp8 block", "plain", "plain", "plain")
    capability = 8, 9
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "An L4")

    def check(device=gpu, **changes):
        config = tiny_target().config
        layers = tuple(dataclasses.replace(kind, **changes) for kind in config.layers)
        check_forms(dataclasses.replace(config, layers=layers), device)

    check()
    check(torch.device("cpu"), forms=forms)
    line = "FP8 weights need a GPU of compute capability 9.0, An L4 has 8.9"
    with pytest.raises(ValueError, match=line):
        check(forms=forms)
    capability = 9, 0
    check(forms=forms)
    with pytest.raises(ValueError, match="the width of an MLP is 40, a multiple of 16 is needed"):
        check(forms=forms, intermediate_size=40)


def test_the_heads_of_both_models_are_checked(monkeypatch):
    found = []
    monkeypatch.setattr("specdec.start.runners.check_heads", lambda role, *_: found.append(role))
    LLM("demo", {"model": "demo/eagle3"}, device="cpu", max_model_len=64, max_num_seqs=1)
    assert found == ["target", "draft"]


@pytest.mark.parametrize("id", [4096, -5, 10**6, 2**70])
def test_an_eos_id_outside_the_vocabulary_builds_no_engine(target, id):
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id is"):
        LLM(str(target(eos_token_id=id)), device="cpu")


@pytest.mark.parametrize("count", [MAX_STOP_IDS, MAX_STOP_IDS + 1])
def test_more_eos_ids_than_can_be_masked_build_no_engine(target, count):
    directory = target(eos_token_id=[*range(40)])
    ids = json.dumps({"eos_token_id": [*range(20, count)]})
    (directory / "generation_config.json").write_text(ids)
    if count > MAX_STOP_IDS:
        with pytest.raises(
            CheckpointError, match=r"config\.json.*: eos_token_id has 65 ids, at mo"
        ):
            LLM(str(directory), device="cpu")
        return
    llm = LLM(str(directory), device="cpu", max_model_len=64, max_num_seqs=1)
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=3)
    assert len(llm.generate("def f(", params)[0].outputs[0].token_ids) >= 2


def with_token(directory, token, **fields):
    """The directory, its tokenizer with one more added token."""
    file = directory / "tokenizer.json"
    keys = json.loads(file.read_text())
    keys["added_tokens"].append({**keys["added_tokens"][0], "content": "<|more|>", "id": token})
    file.write_text(json.dumps(keys))
    return directory


def test_a_tokenizer_with_ids_outside_the_vocabulary_builds_no_engine(target, monkeypatch):
    directory = with_token(target(), 4096)
    monkeypatch.setattr(
        "specdec.start.runners.load_target",
        lambda *args, **options: pytest.fail("weights were read"),
    )
    words = r"tokenizer\.json: ids of 1 tokens are outside .* \(0 to 4095\): '<\|more\|>' 4096"
    for options in ({}, {"tokenizer": str(directory)}):
        model = "demo" if options else str(directory)
        with pytest.raises(CheckpointError, match=words) as error:
            LLM(model, device="cpu", **options)
        assert error.value.directory == directory


def test_a_token_that_a_tokenizer_adds_to_every_text_is_in_the_vocabulary(target):
    directory = target()
    file = directory / "tokenizer.json"
    keys = json.loads(file.read_text())
    for token in keys["post_processor"]["special_tokens"].values():
        token["ids"] = [5000]
    file.write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match="'added to every text' 5000"):
        LLM(str(directory), device="cpu")


@pytest.mark.parametrize("own, expected", [(None, {0}), (7, {7})])
def test_the_tokenizers_eos_ends_a_text_where_no_config_names_one(target, own, expected):
    directory = target(eos_token_id=own)
    (directory / "generation_config.json").write_text("{}")
    file = directory / "tokenizer_config.json"
    keys = json.loads(file.read_text())
    file.write_text(json.dumps(keys | {"eos_token": Tokenizer(directory).decode([0], False)}))
    llm = LLM(str(directory), device="cpu", max_model_len=64, max_num_seqs=1)
    assert llm.engine.intake.eos_token_ids == expected


def test_an_eos_that_the_target_cannot_draw_is_none():
    class Padded:
        eos_token_id = 64

    assert _tokenizers_eos(Padded(), vocab_size=64) == ()
    assert _tokenizers_eos(Padded(), vocab_size=65) == (64,)


@pytest.mark.parametrize(
    "name", ["x" * 5000, "/" + "x" * 5000, "~no-such-user/x", "x" * 300 + "/y", "a\0/b"]
)
def test_a_name_that_can_be_no_path_is_a_value_error(name):
    with pytest.raises(ValueError, match=r"^target "):
        locate(name, "target")


@pytest.mark.parametrize("points_to", ["nowhere", "loop"])
def test_a_link_to_nothing_is_no_hub_id(tmp_path, monkeypatch, points_to):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop").symlink_to(points_to)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="target a/loop: no directory; give the directory"):
        locate("a/loop", "target")
