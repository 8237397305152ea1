"""What quantization_config may say of FP8, and what is refused by name."""

import copy
import json

import pytest

from tests.weights.fp8 import BLOCK, CHANNEL, CONFIGS, FORMS, save_odd, write_fp8
from weights import CheckpointError, inspect_checkpoint, load_target
from weights.ignored import Ignored
from weights.ranks import check_target_ranks

GROUP = "quantization_config.config_groups.group_0"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_odd("llama", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def written(plain, tmp_path_factory):
    """Directories of both forms."""
    found = {form: tmp_path_factory.mktemp(form) for form in FORMS}
    for form, directory in found.items():
        write_fp8(plain, directory, form)
    return found


def with_config(directory, value):
    """Replace the quantization_config of a checkpoint."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": value}))


def changed(path, value):
    """Take the published config of rows' scales with another value at `path`, from the group on."""
    config = copy.deepcopy(CHANNEL)
    *keys, last = path.split(".")
    place = config["config_groups"]["group_0"]
    for key in keys:
        place = place[key]
    place[last] = value
    return config


BLOCKS = copy.deepcopy(CHANNEL)
BLOCKS["config_groups"]["group_0"]["weights"] |= {
    "strategy": "block",
    "block_structure": [128, 128],
}
BLOCKS["config_groups"]["group_0"]["input_activations"] |= {"strategy": "group", "group_size": 128}
TOKENS = copy.deepcopy(BLOCKS)
TOKENS["config_groups"]["group_0"]["input_activations"] |= {"strategy": "token"}
REFUSED = {
    "per-tensor activations": (
        changed("input_activations.strategy", "tensor"),
        f"{GROUP}.input_activations.strategy 'tensor' is not supported: other scales than a row's "
        "depend on other rows",
    ),
    "static activations": (
        changed("input_activations.dynamic", False),
        f"{GROUP}.input_activations.dynamic False is not supported: static scales are not read",
    ),
    "weights alone": (
        changed("input_activations", None),
        f"{GROUP}.input_activations is None, an object is needed",
    ),
    "weights per tensor": (
        changed("weights.strategy", "tensor"),
        f"{GROUP}.weights.strategy 'tensor' is not supported: channel or block is needed",
    ),
    "INT8": (
        changed("weights.type", "int"),
        f"{GROUP}.weights.type 'int' is not supported: FP8 is needed",
    ),
    "no type, which is an integer": (
        changed("weights", {"strategy": "channel"}),
        f"{GROUP}.weights.type 'int' is not supported: FP8 is needed",
    ),
    "INT4": (
        changed("weights.num_bits", 4),
        f"{GROUP}.weights.num_bits 4 is not supported: 8 bits are needed",
    ),
    "other targets": (
        changed("targets", ["re:.*mlp.*"]),
        f"{GROUP}.targets ['re:.*mlp.*'] is not supported: ['Linear'] is needed",
    ),
    "an unknown key": (
        changed("weights.is_mse", True),
        f"{GROUP}.weights.is_mse True is not supported",
    ),
    "blocks with scales of rows": (
        TOKENS,
        f"{GROUP}.input_activations.strategy 'token' is not supported: with blocks, groups of 128 "
        "are needed",
    ),
    "NVFP4": (
        CHANNEL | {"format": "nvfp4-pack-quantized"},
        "quantization_config.format 'nvfp4-pack-quantized' is not supported: only float-quantized "
        "is read",
    ),
    "several groups": (
        CHANNEL | {"config_groups": {"a": {}, "b": {}}},
        "quantization_config.config_groups has 2 groups, one group is needed",
    ),
    "a quantised cache": (
        CHANNEL | {"kv_cache_scheme": {"num_bits": 8}},
        "quantization_config.kv_cache_scheme {'num_bits': 8} is not supported: the cache stays 16 "
        "bits",
    ),
    "a pattern that never ends": (
        CHANNEL | {"ignore": ["re:(a+)+$"]},
        "quantization_config.ignore: 're:(a+)+$' repeats a group, or more than 3 times",
    ),
    "static, fp8": (
        BLOCK | {"activation_scheme": "static"},
        "quantization_config.activation_scheme 'static' is not supported: only scales of their own "
        "row are read",
    ),
    "per tensor, fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "quantization_config.weight_block_size None is not supported: [128, 128] is needed",
    ),
    "other blocks": (
        BLOCK | {"weight_block_size": [64, 128]},
        "quantization_config.weight_block_size [64, 128] is not supported: [128, 128] is needed",
    ),
    "E5M2": (
        BLOCK | {"fmt": "e5m2"},
        "quantization_config.fmt 'e5m2' is not supported",
    ),
    "MXFP8": (
        BLOCK | {"scale_fmt": "ue8m0"},
        "quantization_config.scale_fmt 'ue8m0' is not supported: scales of 16 or 32 bits are "
        "needed",
    ),
    "another method": (
        {"quant_method": "awq", "bits": 4},
        "quantization_config {'quant_method': 'awq', 'bits': 4} is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_in_one_line(written, name):
    config, line = REFUSED[name]
    directory = written["channel"]
    with_config(directory, config)
    with pytest.raises(CheckpointError) as error:
        load_target(directory, progress=False)
    assert error.value.problems == (f"config.json: {line}",)


@pytest.mark.parametrize(
    "form, keys",
    [
        ("channel", {"quantization_status": "frozen", "version": "0.12.2", "transform_config": {}}),
        ("channel", {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}),
        ("channel", {"ignore": []}),
        ("block", {"modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}),
        ("block", {"ignored_layers": ["lm_head"], "scale_fmt": "float"}),
        ("block", BLOCKS),
    ],
)
def test_keys_of_published_configs_are_read(written, form, keys):
    with_config(written[form], CONFIGS[form] | keys if keys is not BLOCKS else BLOCKS)
    loaded = load_target(written[form], progress=False)
    assert {*loaded.config.layers[0].forms} == {f"fp8 {form}"}
    assert not loaded.report.notes


def test_an_entry_that_fits_no_module_is_a_note(written):
    entries = ["lm_head", "model.layers.0.mlp.gate", "re:.*vision.*"]
    with_config(written["channel"], CHANNEL | {"ignore": entries})
    note = "config.json: quantization_config: {} fits no module"
    assert load_target(written["channel"], progress=False).report.notes == tuple(
        note.format(repr(each)) for each in entries[1:]
    )


def test_parts_of_one_product_need_one_form(plain, tmp_path):
    entries = ["model.layers.1.self_attn.k_proj"]
    write_fp8(plain, tmp_path, "block", r"1.self_attn.k_proj", modules_to_not_convert=entries)
    with pytest.raises(CheckpointError) as error:
        load_target(tmp_path, progress=False)
    assert error.value.problems[0] == (
        "config.json: quantization_config: model.layers.1.self_attn.k_proj is plain and "
        "model.layers.1.self_attn.q_proj is fp8 block: one product needs one form"
    )


def test_inspect_names_the_form_of_each_product(written):
    with_config(written["channel"], CHANNEL)
    text = str(inspect_checkpoint(written["channel"]))
    for product in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        assert f"{product} " in text
    assert text.count("fp8 channel") == 4
    assert "problem" not in text


def test_columns_of_a_rank_are_whole_blocks(written):
    """Neither 96 of o_proj nor 160 of down_proj are."""
    for form in FORMS:
        with_config(written[form], CONFIGS[form])
        config = load_target(written[form], progress=False).config
        check_target_ranks(config, 1)
        with pytest.raises(ValueError, match="tensor_parallel_size=2: ") as error:
            check_target_ranks(config, 2)
        assert str(error.value) == (
            "tensor_parallel_size=2: num_attention_heads * head_dim is 192, in FP8 no multiple of "
            "2 * 128; intermediate_size is 320, in FP8 no multiple of 2 * 128; possible: 1"
        )


@pytest.mark.parametrize(
    "entry, fits",
    [
        ("lm_head", ["lm_head", "model.lm_head"]),
        ("model.layers.1", ["model.layers.1", "model.layers.1.mlp.up_proj"]),
        ("mlp.gate", ["model.layers.0.mlp.gate"]),
        ("model.layers.*.mlp.gate", ["model.layers.7.mlp.gate"]),
    ],
)
def test_an_entry_of_fp8_is_a_module_with_all_that_it_holds(entry, fits):
    ignored = Ignored([entry], has_parts=True)
    for other in ("model.layers.10.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "head"):
        assert other not in ignored
    assert ignored.unused == [entry]
    assert all(module in ignored for module in fits)
    assert ignored.unused == []


def test_an_entry_of_compressed_tensors_is_a_whole_name_or_a_pattern():
    ignored = Ignored(["model.layers.1", r"re:.*\.o_proj", "re:.*mlp.gate$"])
    assert "model.layers.1.mlp.up_proj" not in ignored
    assert "model.layers.1" in ignored
    assert "model.layers.2.self_attn.o_proj" in ignored
    assert "model.layers.2.mlp.gate_proj" not in ignored


@pytest.mark.parametrize(
    "entry",
    [
        *("re:(", "re:" + "a" * 300, "re:.*.*.*.*x", "re:(a|b)*"),
        *("re:" + ".?" * 30 + "." * 30 + "!", "re:" + "(.|..)" * 30 + "!", "re:" + "a??" * 30),
    ],
)
def test_a_pattern_that_could_take_for_ever_is_refused(entry):
    with pytest.raises(ValueError, match="re:"):
        Ignored([entry])


@pytest.mark.parametrize(
    "entry",
    [
        r"re:.*layers\.(0|1|2|10|11|12|13|14|15|16|20|21|46|47)\..*",
        r"re:.*\.layers\.[0-9]+\.self_attn\.(q|k|v)_proj.*",
        r"re:(model\.)?layers\.(0|1)\.(mlp|self_attn)\..*",
        r"re:^(?!.*(?:\.|^)(?:self_attn|mlp)\.).*$",
    ],
)
def test_a_pattern_may_have_some_alternatives(entry):
    assert ("model.layers.0.self_attn.q_proj" in Ignored([entry])) == ("?!" not in entry)


def test_too_many_patterns_are_refused_but_not_names():
    assert "m.7" in Ignored([f"m.{i}" for i in range(1000)])
    with pytest.raises(ValueError, match="it has 65 patterns, and at most 64 are read"):
        Ignored([f"re:m{i}" for i in range(65)])


def test_a_long_name_fits_no_pattern():
    """Such a search takes the third power of the name's length."""
    assert "a" * 100_000 not in Ignored(["re:.*.*.*x"])
