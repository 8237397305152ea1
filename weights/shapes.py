"""The tensors a config demands, by unfused name, with shapes: all that a checkpoint must hold.

`check_binding` compares them with what files hold: missing, unexpected, misshapen.
"""

from collections.abc import Container, Mapping

from weights.config import ExpertsConfig, Form, LayerKind, TargetConfig
from weights.draft.config import BlockConfig, DraftConfig, EagleConfig
from weights.errors import Problems
from weights.files.header import CODE_DTYPES, FLOAT_DTYPES, INTEGER_DTYPES, TensorEntry
from weights.fp8 import is_scale, scale_of, stored_shape

Shapes = dict[str, tuple[int, ...]]

OTHER_FORMS = "packed, fp8 and integer weights are not supported"
STATIC = "static scales of activations are not supported"
OF_CACHE = "scales of a cache or of attention are not supported"
QUANTISED = {  # why tensors with these last names are refused where nothing demands them
    **dict.fromkeys(("weight_packed", "weight_scale", "weight_scale_2"), OTHER_FORMS),
    **dict.fromkeys(("weight_scale_inv", "weight_zero_point", "weight_shape"), OTHER_FORMS),
    **dict.fromkeys(("weight_g_idx", "qweight", "qzeros", "scales", "g_idx"), OTHER_FORMS),
    **dict.fromkeys(("weight_global_scale", "input_global_scale"), OTHER_FORMS),
    **dict.fromkeys(("input_scale", "activation_scale"), STATIC),
    **dict.fromkeys(("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"), OF_CACHE),
    **dict.fromkeys(("output_scale", "softmax_scale"), OF_CACHE),
}
# allowed dtypes and the words for them: of weights, and of other tensors
WEIGHT = (FLOAT_DTYPES, OTHER_FORMS)
PLAIN = (FLOAT_DTYPES, "plain numbers are needed, unless quantization_config says otherwise")
CODES = (CODE_DTYPES, "F8_E4M3 is needed, as quantization_config says")
SCALES = ({"BF16", "F16", "F32"}, "BF16, F16 or F32 is needed")
TABLES: dict[str, tuple[Container[str], str]] = {
    "d2t": (INTEGER_DTYPES, "integers are needed"),
    "t2d": ({"BOOL"}, "BOOL is needed"),
}
PACKED = ({"U8"}, "U8 is needed")  # of MXFP4
BLOCK = 32  # columns of an MXFP4 weight that share a scale
MOST_FILES = 4  # of those that lack a tensor, in its line


def target_shapes(config: TargetConfig) -> Shapes:
    D = config.hidden_size
    vocab = (config.vocab_size, D)
    shapes: Shapes = {"embed_tokens.weight": vocab, "norm.weight": (D,)}
    for i, kind in enumerate(config.layers):
        shapes |= layer_shapes(f"layers.{i}.", kind, D)
    return shapes if config.has_tied_head else shapes | {"lm_head.weight": vocab}


def layer_shapes(
    prefix: str, layer: LayerKind, entry_width: int, has_input_layernorm: bool = True
) -> Shapes:
    """One decoder layer; its attention reads `entry_width` channels (EAGLE-3's first layer: 2D)."""
    D = layer.hidden_size
    I = layer.intermediate_size
    C = layer.head_dim
    forms = layer.forms
    query, kv = layer.num_heads * C, layer.num_kv_heads * C
    shapes: Shapes = {f"{prefix}post_attention_layernorm.weight": (D,)}
    if has_input_layernorm:
        shapes[f"{prefix}input_layernorm.weight"] = (D,)
    if layer.has_sinks:
        shapes[f"{prefix}self_attn.sinks"] = (layer.num_heads,)
    if layer.qk_norm:
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (C,) for name in "qk"}
    products = {
        "self_attn.q_proj": (query, entry_width, layer.qkv_bias, forms.qkv_proj),
        "self_attn.k_proj": (kv, entry_width, layer.qkv_bias, forms.qkv_proj),
        "self_attn.v_proj": (kv, entry_width, layer.qkv_bias, forms.qkv_proj),
        "self_attn.o_proj": (D, query, layer.o_bias, forms.o_proj),
    }
    if layer.experts is not None:
        shapes |= _experts_shapes(f"{prefix}mlp.", layer.experts, D)
    else:
        products |= {
            "mlp.gate_proj": (I, D, layer.mlp_bias, forms.gate_up_proj),
            "mlp.up_proj": (I, D, layer.mlp_bias, forms.gate_up_proj),
            "mlp.down_proj": (D, I, layer.mlp_bias, forms.down_proj),
        }
    for name, (rows, columns, bias, form) in products.items():
        shapes |= _weight_shapes(f"{prefix}{name}.weight", (rows, columns), form)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def _weight_shapes(name: str, shape: tuple[int, ...], form: Form) -> Shapes:
    """Give a weight, and its scales if it has the form of FP8."""
    shapes: Shapes = {name: shape}
    return shapes if form == "plain" else shapes | {scale_of(name): stored_shape(form, shape)}


def _experts_shapes(prefix: str, experts: ExpertsConfig, D: int) -> Shapes:
    E, I = len(experts.held), experts.width
    shapes: Shapes = {f"{prefix}gate.weight": (experts.num, D)}
    if experts.has_biases:
        shapes[f"{prefix}gate.bias"] = (experts.num,)
    if experts.is_turned:
        return shapes | _turned_shapes(f"{prefix}experts.", experts, D)
    if experts.is_stacked:
        both = {"gate_up_proj": (E, 2 * I, D), "down_proj": (E, D, I)}
        return shapes | {f"{prefix}experts.{name}": shape for name, shape in both.items()}
    products = {"gate_proj": (I, D), "up_proj": (I, D), "down_proj": (D, I)}
    for e in experts.held:
        for name, shape in products.items():
            shapes |= _weight_shapes(f"{prefix}experts.{e}.{name}.weight", shape, experts.form)
    return shapes


def _turned_shapes(prefix: str, experts: ExpertsConfig, D: int) -> Shapes:
    """List gpt-oss's experts: each row of a plain product is a column of files."""
    E, I = len(experts.held), experts.width
    shapes: Shapes = {}
    for name, N, K in (("gate_up_proj", 2 * I, D), ("down_proj", D, I)):
        if experts.has_biases:
            shapes[f"{prefix}{name}_bias"] = (E, N)
        if experts.form == "plain":
            shapes[f"{prefix}{name}_turned"] = (E, K, N)
        else:
            shapes[f"{prefix}{name}_blocks"] = (E, N, K // BLOCK, BLOCK // 2)
            shapes[f"{prefix}{name}_scales"] = (E, N, K // BLOCK)
    return shapes


def draft_shapes(config: DraftConfig) -> Shapes:
    return _block_shapes(config) if isinstance(config, BlockConfig) else eagle_shapes(config)


def eagle_shapes(config: EagleConfig) -> Shapes:
    D = config.layer.hidden_size
    shapes: Shapes = {}
    for i in range(config.num_layers):
        width = 2 * D if config.entry == "qkv" and i == 0 else D
        has_norm = config.has_input_layernorm or i > 0
        shapes |= layer_shapes(f"layers.{i}.", config.layer, width, has_norm)
    Dt = config.target_hidden_size
    taps = len(config.aux_boundaries)
    features = max(taps, 1) * Dt
    around: list[tuple[bool, str, tuple[int, ...]]] = [  # wanted or not, name, shape
        (config.has_own_embedding, "embed_tokens.weight", (config.vocab_size, D)),
        (config.has_own_head, "lm_head.weight", (config.draft_vocab_size, D)),
        (config.has_final_norm, "norm.weight", (D,)),
        (config.entry == "qkv" and config.has_hidden_norm, "layers.0.hidden_norm.weight", (D,)),
        (config.has_fc, "fc.weight", (D, D + Dt) if config.entry == "fc" else (D, features)),
        (config.has_fc and config.fc_bias, "fc.bias", (D,)),
        (config.norm_before_fc, "input_norm.weight", (features,)),
        (config.has_embed_norm, "embed_norm.weight", (D,)),
        (config.has_feature_norm, "feature_norm.weight", (Dt,)),
        (config.has_d2t, "d2t", (config.draft_vocab_size,)),
        (config.is_parallel, "mask_hidden", (1, 1, features)),
        *((config.has_fc_norm, f"fc_norm.{i}.weight", (Dt,)) for i in range(taps)),
    ]
    return shapes | {name: shape for wanted, name, shape in around if wanted}


def _block_shapes(config: BlockConfig) -> Shapes:
    D, r = config.layer.hidden_size, config.markov_rank
    V, W = config.vocab_size, config.draft_vocab_size
    shapes: Shapes = {"norm.weight": (D,), "hidden_norm.weight": (D,)}
    shapes["fc.weight"] = (D, len(config.aux_boundaries) * config.target_hidden_size)
    for i in range(config.num_layers):
        shapes |= layer_shapes(f"layers.{i}.", config.layer, D)
        for name in ("attention_conv", "mlp_conv") if config.conv_group_size else ():
            shapes[f"layers.{i}.{name}.base_kernel"] = (2, 2, D)
            changes = 2 * 2 * (D // config.conv_group_size)
            shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (changes, D)
    read = D + r if config.confidence == "markov" else D
    markov, selector, s = "markov_head.", "candidate_selector.", config.selector_rank
    around: list[tuple[bool, str, tuple[int, ...]]] = [  # wanted or not, name, shape
        (config.has_own_embedding, "embed_tokens.weight", (V, D)),
        (config.has_own_head, "lm_head.weight", (W, D)),
        (config.has_d2t, "d2t", (W,)),
        (config.markov is not None, f"{markov}markov_w1.weight", (V, r)),
        (config.markov is not None, f"{markov}markov_w2.weight", (W, r)),
        (config.markov == "gated", f"{markov}gate.weight", (r, D + r)),
        (config.markov == "gated", f"{markov}gate.bias", (r,)),
        (config.markov == "rnn", f"{markov}joint.weight", (3 * r, 2 * r + D)),
        (config.markov == "rnn", f"{markov}joint.bias", (3 * r,)),
        (config.confidence is not None, "confidence_head.proj.weight", (1, read)),
        (config.confidence is not None, "confidence_head.proj.bias", (1,)),
        (s > 0, f"{selector}predecessor_codebook", (V, s)),
        (s > 0, f"{selector}successor_codebook", (W, s)),
        (s > 0, f"{selector}hidden_projection.weight", (s, D)),
    ]
    return shapes | {name: shape for wanted, name, shape in around if wanted}


def check_binding(wanted: Shapes, held: Mapping[str, TensorEntry], problems: Problems) -> None:
    """held: tensors by the names of this package; each problem names the file and its key."""
    files = file_names(held)
    for name, shape in wanted.items():
        if problems.is_full:
            return
        if name not in held:
            problems.add(f"{files}: missing {name} {list(shape)}")
        elif held[name].shape != shape:
            problems.add(f"{held[name].where} is {list(held[name].shape)}, {list(shape)} is needed")
    for name, entry in held.items():
        if problems.is_full:
            return
        if name not in wanted and not _is_quantised(name):
            problems.add(f"{entry.file.name}: unexpected {entry.name} {list(entry.shape)}")


def check_dtypes(
    held: Mapping[str, TensorEntry], problems: Problems, wanted: Container[str] = ()
) -> None:
    """Weights must be plain floating point, or FP8; d2t and t2d are the only other tensors.

    wanted: names of tensors, among them those of the scales that FP8 weights need; drafts have none
    """
    for name, entry in held.items():
        if problems.is_full:
            return
        allowed, words = _dtypes_of(name, wanted)
        if name not in wanted and _is_quantised(name):
            problems.add(f"{entry.where} is {entry.dtype}: {QUANTISED[_last(name)]}")
        elif entry.dtype not in allowed:
            problems.add(f"{entry.where} is {entry.dtype}: {words}")


def _dtypes_of(name: str, wanted: Container[str]) -> tuple[Container[str], str]:
    """Give the dtypes that a tensor may have, and the words for them."""
    if _is_packed(name):
        return PACKED
    if is_scale(name):
        return SCALES
    if scale_of(name) in wanted:
        return CODES
    return TABLES.get(name, PLAIN if name in wanted else WEIGHT)


def file_names(held: Mapping[str, TensorEntry]) -> str:
    """The files that hold the tensors, the first few by name: where a missing one is missing."""
    files = sorted({entry.file.name for entry in held.values()})
    rest = f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""
    return ", ".join(files[:MOST_FILES]) + rest


def _is_packed(name: str) -> bool:
    return ".experts." in name and name.endswith(("_proj_blocks", "_proj_scales"))


def _is_quantised(name: str) -> bool:
    return _last(name) in QUANTISED


def _last(name: str) -> str:
    return name.rpartition(".")[2]
