"""inspect_checkpoint: all that headers and config.json say, even of a broken checkpoint."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.weights.formats import FORMATS
from tests.weights.tiny import (
    draft_tensors,
    eagle1_config,
    eagle3_config,
    tiny_target,
    write_target,
)
from weights import CheckpointError, EagleConfig, TargetConfig, inspect_checkpoint
from weights.demo import demo_directory
from weights.files.header import TensorEntry
from weights.files.reader import Reader
from weights.inspect import Inspection
from weights.report import BindingReport


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("inspecting reads no data")

    monkeypatch.setattr(Reader, "read", refuse)


def test_a_target_with_its_tensor_table(tmp_path):
    target = tiny_target()
    write_target(tmp_path, target, num_shards=2)
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.report.role == "target"
    assert isinstance(inspection.config, TargetConfig)
    assert inspection.problems == ()
    text = str(inspection)
    for words in (
        "num_layers",
        "config.json: num_hidden_layers",
        "2 files",
        "[96, 32]",
        "12,288",
    ):
        assert words in text, words


def entry(name, shape):
    stop = 2 * shape[0] * shape[1]
    return TensorEntry(name=name, dtype="BF16", shape=shape, file=Path("a"), start=0, stop=stop)


def table(names, shapes=None):
    """What is said of tensors with these names."""
    report = BindingReport(directory=Path("x"), role="target", format="llama", fields=())
    shapes = shapes or {}
    tensors = tuple(entry(name, shapes.get(name, (2, 3))) for name in names)
    inspection = Inspection(report=report, config=None, tensors=tensors, problems=())
    return str(inspection).splitlines()[2:]


def test_tensors_that_differ_by_numbers_share_a_line():
    experts = [f"layers.{i}.experts.{j}.up" for i in range(2) for j in range(3)]
    lines = table(["norm", *experts, "layers.0.q", "layers.1.q"], {"layers.1.q": (4, 3)})
    assert [" ".join(line.split()) for line in lines] == [
        "norm BF16 [2, 3] 12 a",
        "layers.{0..1}.experts.{0..2}.up 6 x BF16 [2, 3] 72 a",
        "layers.0.q BF16 [2, 3] 12 a",
        "layers.1.q BF16 [4, 3] 24 a",
    ]


@pytest.mark.parametrize("missing", ["layers.1.experts.2.up", "layers.1.experts.0.up"])
def test_where_one_is_missing_each_has_a_line(missing):
    experts = [f"layers.{i}.experts.{j}.up" for i in range(3) for j in range(3)]
    lines = table(name for name in experts if name != missing)
    assert len(lines) == 8


@pytest.mark.parametrize("name", ["target", "eagle3"])
def test_a_narrow_terminal_holds_all_lines(name):
    inspection = inspect_checkpoint(demo_directory(name))
    lines = inspection.text(60).splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(inspection.text(60).split()).count("BF16") == str(inspection).count("BF16")
    words = set(str(inspection).split())
    assert words == set(inspection.text(60).split())


# an MTP head's directory is its target's, and inspected as that
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "mimo-mtp"])
def test_a_draft_of_every_format_with_and_without_its_target(tmp_path, name):
    target = tiny_target()
    full = {
        "aux_boundaries": (2, 3, 5, 6, 7),
        "qk_norm": True,
        "has_d2t": False,
        "draft_vocab_size": 96,
    }
    candidates = [eagle1_config(target), eagle3_config(target), eagle3_config(target, **full)]
    config = next(config for config in candidates if FORMATS[name].can_express(config, target))
    FORMATS[name].write(tmp_path, config, draft_tensors(config), target)
    for known in (None, target.config):
        inspection = inspect_checkpoint(tmp_path, known)
        assert inspection.report.role == "draft"
        assert isinstance(inspection.config, EagleConfig)
        assert inspection.config.entry == config.entry
        assert inspection.problems == ()
        assert ("without the target" in str(inspection)) is (known is None)


def test_what_is_wrong_is_listed_beside_what_is_known(tmp_path):
    target = tiny_target()
    write_target(tmp_path, target, hidden_size=64)
    inspection = inspect_checkpoint(tmp_path)
    assert any("[96, 64] is needed" in problem for problem in inspection.problems)
    assert "problem: " in str(inspection)
    write_target(tmp_path, target, model_type="gemma3")
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.config is None
    assert inspection.report.format == "unknown"
    assert len(inspection.tensors) > 0


def test_a_broken_draft_needs_no_target_to_be_seen(tmp_path):
    for file in demo_directory("eagle3").iterdir():
        shutil.copy(file, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"][:-1].clone()
    del tensors["norm.weight"]
    assert inspect_checkpoint(tmp_path).problems == ()
    save_file(tensors, tmp_path / "model.safetensors")
    problems = inspect_checkpoint(tmp_path).problems
    assert len(problems) == 2
    assert any("missing norm.weight" in problem for problem in problems)
    assert any(
        "down_proj.weight is [255, 768], [256, 768] is needed" in problem for problem in problems
    )


@pytest.mark.parametrize(
    "left, missing",
    [("hidden_norm.weight", "missing fc.weight"), ("fc.weight", "missing layers.0.hidden_norm")],
)
def test_either_sign_alone_tells_a_draft_from_a_target(tmp_path, left, missing):
    target = tiny_target()
    config = eagle3_config(target)
    FORMATS["eagle-3"].write(tmp_path, config, draft_tensors(config), target)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    signs = [name for name in tensors if name.endswith(("fc.weight", "hidden_norm.weight"))]
    assert len(signs) == 2
    for name in signs:
        if not name.endswith(left):
            del tensors[name]
    save_file(tensors, file)
    inspection = inspect_checkpoint(tmp_path, target.config)
    assert inspection.report.role == "draft"
    assert missing in "; ".join(inspection.problems)


def test_headers_that_cannot_be_read_are_an_error(tmp_path):
    with pytest.raises(CheckpointError):
        inspect_checkpoint(tmp_path)


def test_a_draft_with_a_fatal_problem_lists_ignored_tensors(tmp_path):
    target = tiny_target()
    config = eagle3_config(target, rms_norm_eps=-1.0)
    FORMATS["eagle-3"].write(tmp_path, config, draft_tensors(config), target)
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.config is None
    assert ("t2d", "a mask used in training; checked against d2t") in inspection.report.ignored
