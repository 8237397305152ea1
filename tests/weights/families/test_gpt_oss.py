"""gpt-oss: what its config means, both forms of its weights, and what is refused."""

import pytest
import torch

from specdec.kernels.experts.mxfp4 import dequantised_ref
from tests.weights.gpt_oss import QUANTISED, rewritten, write_both_forms
from tests.weights.published import save
from weights import CheckpointError, Clamp, RopeConfig, load_target

LAYER = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The model of transformers, and its directory."""
    directory = tmp_path_factory.mktemp("target")
    return save("gpt_oss", directory), directory


@pytest.fixture(scope="module")
def both_forms(saved, tmp_path_factory):
    """One model in MXFP4 and with a number each."""
    directories = [tmp_path_factory.mktemp(name) for name in ("packed", "plain")]
    write_both_forms(saved[1], *directories)
    return directories


def test_tensors_are_those_that_transformers_has_in_memory(saved):
    model, directory = saved
    state = {key.removeprefix("model."): value for key, value in model.state_dict().items()}
    for key, tensor in load_target(directory, progress=False).tensors.items():
        key = key.replace("mlp.gate.", "mlp.router.")
        if "qkv_proj" in key:
            found = torch.cat([state.pop(key.replace("qkv", x)) for x in "qkv"])
        else:
            found = state.pop(key)
        if "experts" in key and not key.endswith("bias"):
            found = found.transpose(1, 2)
        if "gate_up_proj" in key:
            found = torch.cat([found[:, ::2], found[:, 1::2]], 1)
        assert torch.equal(tensor, found), key
    assert state == {}


def test_sinks_are_float32_whatever_the_dtype(saved):
    tensors = load_target(saved[1], dtype=torch.bfloat16, progress=False).tensors
    assert {x.dtype for name, x in tensors.items() if "sinks" in name} == {torch.float32}
    assert {x.dtype for name, x in tensors.items() if "sinks" not in name} == {torch.bfloat16}


def test_windows_are_those_of_the_config_or_of_even_layers(saved, tmp_path):
    def windows(**keys):
        absent = [key for key, value in keys.items() if value is None]
        directory = rewritten(saved[1], tmp_path, lambda _: None, absent, **keys)
        return [kind.window for kind in load_target(directory, progress=False).config.layers]

    assert windows() == windows(layer_types=None) == [24, None] * 3
    assert windows(sliding_window=None) == [128, None] * 3
    full, sliding = "full_attention", "sliding_attention"
    assert windows(layer_types=[full] * 5 + [sliding]) == [None] * 5 + [24]


def test_what_the_config_does_not_say_is_as_published(saved, tmp_path):
    absent = ("swiglu_limit", "swiglu_alpha", "rope_parameters", "attention_bias", "rms_norm_eps")
    directory = rewritten(
        saved[1], tmp_path, lambda _: None, (*absent, "num_experts_per_tok"), experts_per_token=4
    )
    loaded = load_target(directory, progress=False)
    kind = loaded.config.layers[0]
    assert kind.experts.clamp == Clamp(limit=7.0, alpha=1.702)
    assert kind.experts.per_token == 4
    assert kind.rms_norm_eps == 1e-5
    assert (kind.qkv_bias, kind.o_bias, kind.has_sinks) == (True, True, True)
    assert kind.rope == RopeConfig(
        theta=150000.0,
        kind="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        truncate=False,
    )


def test_packed_weights_are_the_numbers_that_they_stand_for(both_forms):
    packed, plain = (load_target(each, progress=False) for each in both_forms)
    assert {kind.experts.form for kind in packed.config.kinds} == {"mxfp4"}
    for name, expected in plain.tensors.items():
        found = packed.tensors[name]
        if name.endswith(("gate_up_proj", "down_proj")):
            found = dequantised_ref(
                found, packed.tensors[f"{name}_scales"], 2 if "up" in name else 1
            )
            found = found[..., : expected.shape[2]]
        assert torch.equal(found, expected), name
    assert {"mxfp4"} == {row.value for row in packed.report.fields if row.field == "expert_form"}
    assert not [note for note in packed.report.notes if "cast" in note]


@pytest.mark.gpu
@pytest.mark.parametrize("which", [0, 1])
def test_a_gpu_gets_what_a_cpu_gets(both_forms, which):
    expected = load_target(both_forms[which], progress=False).tensors
    found = load_target(both_forms[which], device="cuda", progress=False).tensors
    assert all(torch.equal(found[name].cpu(), x) for name, x in expected.items())


def problems_of(source, out, change, **keys):
    with pytest.raises(CheckpointError) as error:
        load_target(rewritten(source, out, change, **keys), progress=False)
    return error.value.problems


def test_a_plain_checkpoint_lists_all_that_is_wrong(saved, tmp_path):
    def spoil(tensors):
        del tensors["model.layers.1.mlp.router.bias"]
        del tensors["model.layers.2.self_attn.sinks"]
        del tensors[f"{LAYER}.down_proj_bias"]
        tensors[f"{LAYER}.gate_up_proj"] = torch.zeros(9, 64, 32)
        tensors["model.layers.1.self_attn.sinks"] = torch.zeros(5)
        tensors[f"{LAYER}.down_proj_scales"] = torch.zeros(9, 64, 1, dtype=torch.uint8)

    text = "\n".join(problems_of(saved[1], tmp_path, spoil))
    for line in (
        "missing layers.1.mlp.gate.bias [9]",
        "missing layers.2.self_attn.sinks [4]",
        "missing layers.1.mlp.experts.down_proj_bias [9, 64]",
        "gate_up_proj is [9, 64, 32], [9, 64, 64] is needed",
        "layers.1.self_attn.sinks is [5], [4] is needed",
        "unexpected model.layers.1.mlp.experts.down_proj_scales [9, 64, 1]",
    ):
        assert line in text, text
    assert len(text.splitlines()) == 6


def test_a_packed_checkpoint_lists_all_that_is_wrong(both_forms, tmp_path):
    def spoil(tensors):
        del tensors[f"{LAYER}.gate_up_proj_scales"]
        tensors[f"{LAYER}.down_proj_blocks"] = torch.zeros(9, 64, 2, 16, dtype=torch.uint8)
        tensors["model.layers.2.mlp.experts.down_proj_blocks"] = torch.zeros(9, 64, 1, 16)

    text = "\n".join(problems_of(both_forms[0], tmp_path, spoil))
    for line in (
        "missing layers.1.mlp.experts.gate_up_proj_scales [9, 64, 2]",
        "down_proj_blocks is [9, 64, 2, 16], [9, 64, 1, 16] is needed",
        "layers.2.mlp.experts.down_proj_blocks is F32: U8 is needed",
    ):
        assert line in text, text
    assert len(text.splitlines()) == 3


def test_scales_out_of_range_are_a_line_for_each_tensor(both_forms, tmp_path):
    """A block of zeros, of either sign, may have any."""

    def spoil(tensors):
        tensors[f"{LAYER}.gate_up_proj_scales"][3, 7, 1] = 1
        tensors[f"{LAYER}.gate_up_proj_scales"][8, 1] = 255
        tensors["model.layers.2.mlp.experts.down_proj_scales"][0, 0, 0] = 129
        tensors["model.layers.3.mlp.experts.down_proj_scales"][:, 5] = 0
        tensors["model.layers.3.mlp.experts.down_proj_blocks"][:, 5] = 0x80

    wrong = "_scales has scales outside 2 to 128"
    second = "model.layers.2.mlp.experts.down_proj"
    assert [line.split(": ", 1)[1] for line in problems_of(both_forms[0], tmp_path, spoil)] == [
        f"{LAYER}.gate_up_proj{wrong}: 3, the least 1, the greatest 255",
        f"{second}{wrong}: 1, the least 129, the greatest 129",
    ]


def test_a_block_of_zeros_takes_any_scale(both_forms, tmp_path):
    def clear(tensors):
        tensors[f"{LAYER}.gate_up_proj_scales"][:, 6, 1] = 255
        tensors[f"{LAYER}.gate_up_proj_blocks"][:, 6, 1] = 0x08

    loaded = load_target(rewritten(both_forms[0], tmp_path, clear), progress=False)
    name = "layers.1.mlp.experts.gate_up_proj"
    found = dequantised_ref(loaded.tensors[name], loaded.tensors[f"{name}_scales"], 2)
    assert (found[:, 3, 32:] == 0).all()


@pytest.mark.parametrize(
    "keys, line",
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'} is not supported"),
        ({"quantization_config": QUANTISED | {"bits": 3}}, "quantization_config.bits 3 is not"),
        ({"quantization_config": QUANTISED | {"dequantize": True}}, "weights stay packed"),
        ({"experts_per_token": 2}, "num_experts_per_tok is 4 and experts_per_token is 2: keep one"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0, a number from 0.001"),
        ({"layer_types": ["sliding_attention"]}, "has 1 entries, and there are 6 layers"),
        ({"quantization_config": QUANTISED, "intermediate_size": 48}, "is 48, a multiple of 32"),
    ],
)
def test_an_odd_value_is_refused_by_name(saved, tmp_path, keys, line):
    assert line in "\n".join(problems_of(saved[1], tmp_path, lambda _: None, **keys))
