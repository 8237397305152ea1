"""The widened pair keeps the small one's tokens and acceptance, though every shape differs."""

import json
import os
import re
import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import weights.convert
import weights.widen
from specdec import LLM, SamplingParams
from specdec.cli import main
from tests.reference import Reference
from weights.demo import demo_directory
from weights.errors import CheckpointError
from weights.widen import MODELS, SHAPES
from weights.widener import Shape, Widener, place_layers

NUM_TOKENS = 32
TINY = ("--shape", "tiny", "--dtype", "float32", "--device", "cpu")
SIZES = {"max_num_seqs": 2, "max_model_len": 256}


@pytest.fixture(scope="module")
def widened(tmp_path_factory):
    """The pair, and what was said meanwhile."""
    out = tmp_path_factory.mktemp("tiny") / "out"
    said = StringIO()
    with redirect_stderr(said), pytest.raises(SystemExit) as left:
        main(["widen", str(out), *TINY])
    assert not left.value.code
    return out, said.getvalue().splitlines()


@pytest.fixture(scope="module")
def pair(widened):
    return widened[0]


@pytest.mark.parametrize("name", ["eagle3", pytest.param("eagle1", marks=pytest.mark.slow)])
def test_the_widened_pair_keeps_tokens_and_acceptance(pair, prompts, references, name):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    draft = {"model": f"demo/{name}", "num_speculative_tokens": 3}
    small = LLM("demo", draft, device="cpu", **SIZES)
    draft = {"model": pair / name, "num_speculative_tokens": 3}
    wide = LLM(pair / "target", draft, device="cpu", **SIZES)

    expected = small.generate(prompts[1:3], params, use_tqdm=False)
    outputs = wide.generate(prompts[1:3], params, use_tqdm=False)

    # only rounding of the factor sqrt(2) differs, and the best token leads by far more than that
    generated = [output.outputs[0].token_ids for output in outputs]
    assert generated == [tokens[:NUM_TOKENS] for tokens in references[1:3]]
    accepted = [LLM.run_stats(each).num_accepted_tokens for each in (expected, outputs)]
    assert accepted[0] > NUM_TOKENS / 2
    assert abs(accepted[0] - accepted[1]) <= 2


def test_widen_says_how_much_it_writes(widened):
    out, said = widened
    files = list(out.rglob("*.safetensors"))
    size = f"{sum(file.stat().st_size for file in files) / 1e6:.0f} MB"
    assert said == [f"writes {size} to {out}"]
    assert {file.name for file in out.parent.iterdir()} == {"out"}
    assert {file.name for file in out.iterdir()} == {*MODELS, "prompts.json"}


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 6, 3 * 10**6))
    words = rf"^{tmp_path}/new/out: \d+ MB are to be written, and 3 MB are free: give a directory"
    with pytest.raises(OSError, match=words):
        widen_tiny(demo_directory("target").parent, tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left")])
@pytest.mark.parametrize("has_out", [True, False])
def test_a_pair_that_is_broken_off_leaves_nothing(tmp_path, monkeypatch, error, has_out):
    if has_out:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes").touch()
    written = []

    def break_off(tensors, file):
        written.append(file.name)
        if len(written) == 3:
            raise error

    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(weights.widen, "write_whole", break_off)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        widen_tiny(demo_directory("target").parent, tmp_path / "out")
    assert len(written) >= 3
    assert sorted(tmp_path.rglob("*")) == before


def test_a_pair_that_another_process_wrote_meanwhile_stays_whole(tmp_path, monkeypatch):
    def write_beside(tensors, file):
        (tmp_path / "out" / "target").mkdir(exist_ok=True)
        (tmp_path / "out" / "target" / "model.safetensors").touch()

    monkeypatch.setattr(weights.widen, "write_whole", write_beside)
    with pytest.raises(OSError, match="target"):
        widen_tiny(demo_directory("target").parent, tmp_path / "out")
    left = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")}
    assert left == {Path("target"), Path("target/model.safetensors")}


@pytest.mark.parametrize("missing", ["prompts.json", "target/tokenizer.json"])
def test_a_source_without_all_files_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, missing
):
    monkeypatch.setattr(weights.widen, "write_whole", lambda *_: pytest.fail("written"))
    shutil.copytree(demo_directory("target").parent, tmp_path / "source")
    (tmp_path / "source" / missing).unlink()
    with pytest.raises(OSError, match=missing):
        widen_tiny(tmp_path / "source", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_source_is_refused_and_not_waited_for(tmp_path, name):
    shutil.copytree(demo_directory("target").parent, tmp_path / "source")
    (tmp_path / "source" / "target" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "source" / "target" / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a file, a regular file is needed"):
        widen_tiny(tmp_path / "source", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": ' + "[" * 100 + "]" * 100 + "}"])
def test_a_config_of_a_source_that_is_no_object_names_its_file(tmp_path, text):
    shutil.copytree(demo_directory("target").parent, tmp_path / "source")
    (tmp_path / "source" / "target" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"(?s)source/target.*config\.json"):
        widen_tiny(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize(
    "key, what",
    [("num_local_experts", "experts"), ("attention_multiplier", "a scale of scores")],
)
def test_what_widening_would_change_is_refused(tmp_path, key, what):
    source = tmp_path / "source"
    shutil.copytree(demo_directory("target").parent, source)
    file = source / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: 8}))
    with pytest.raises(ValueError, match=f"{key}: a target with {what} cannot be widened"):
        widen_tiny(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["self_attn.q_norm.weight", "self_attn.q_proj.bias", "mlp.gate"])
def test_a_tensor_that_widening_does_not_know_is_named(tmp_path, name):
    source = tmp_path / "source"
    shutil.copytree(demo_directory("target").parent, source)
    name = f"model.layers.3.{name}"
    index_file = source / "target" / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"][name] = "further.safetensors"
    index_file.write_text(json.dumps(index))
    save_file({name: torch.ones(64)}, source / "target" / "further.safetensors")
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: a tensor that widening does not"):
        widen_tiny(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["target", "eagle3", "eagle1"])
def test_a_pair_that_is_there_is_not_mixed_with_another(tmp_path, part):
    (tmp_path / part).mkdir()
    (tmp_path / part / "model.safetensors").touch()
    words = f"{part}: safetensors are there already, nothing written"
    with pytest.raises(ValueError, match=words):
        widen_tiny(demo_directory("target").parent, tmp_path)
    assert [file.name for file in tmp_path.rglob("*")] == [part, "model.safetensors"]


def test_a_pair_is_not_widened_in_its_own_directory(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="link: the pair to widen is in it; give another"):
        widen_tiny(tmp_path, tmp_path / "link")


def test_a_shard_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise SafetensorError("no space left")

    source = demo_directory("target").parent
    monkeypatch.setattr(weights.convert, "save_file", fail)
    with pytest.raises(OSError, match=r"model-00001-of-00013\.safetensors: not written: no space"):
        widen_tiny(source, tmp_path)


def widen_tiny(source, out):
    weights.widen.widen_pair(source, out, SHAPES["tiny"], "float32", torch.device("cpu"))


def test_layers_stand_so_that_tapped_streams_are_the_same():
    small, big = sized(num_hidden_layers=8), sized(num_hidden_layers=32)
    assert big.boundaries == (2, 16, 29, 32)
    assert place_layers(small, big) == {0: 0, 1: 1, 2: 2, 3: 3, 16: 4, 29: 5, 30: 6, 31: 7}


def test_added_layers_are_noise_in_front_of_zeros():
    widener = Widener(sized(), sized(hidden_size=32), torch.float32, torch.device("cpu"))
    layer = {
        "x.self_attn.o_proj.weight": torch.ones(32, 16),
        "x.mlp.up_proj.weight": torch.ones(8, 32),
    }

    added = widener.identity(layer)

    assert not added["x.self_attn.o_proj.weight"].any()
    assert added["x.mlp.up_proj.weight"].all()


def test_added_tokens_are_hardly_ever_drawn(prompts):
    """Of 128,256, at temperature 1; bos copied as often took 0.2 of the probability."""
    target = Reference(demo_directory("target"))
    outputs = [target.forward(prompt) for prompt in prompts[:8]]
    head = target.weights["lm_head.weight"]
    small = sized(hidden_size=head.shape[1])
    widener = Widener(small, small, torch.float32, torch.device("cpu"))
    added = widener.head(head, len(head) + 1)[-1]
    shares = [(each.hidden_TD @ added - each.logits_TV.logsumexp(1)).exp() for each in outputs]
    assert 0 < 124_160 * torch.cat(shares).mean() < 1e-3


def test_heads_without_the_small_ones_frequencies_are_refused():
    with pytest.raises(ValueError, match=r"head_dim=12 .* a multiple of the small pair's 8 is"):
        Widener(sized(), sized(head_dim=12), torch.float32, torch.device("cpu"))


def sized(**changes):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 64,
        "draft_vocab_size": 16,
    }
    return Shape(**sizes | changes)
