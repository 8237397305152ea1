"""The form of each product of a target, from quantization_config of its config.json.

FP8 is read as compressed-tensors and as "fp8" write it: weights with a scale for each row or block,
activations with scales of their own row. A scale of all rows of activations would depend on other
requests, so it is refused by name, as is every key and value that the tables below do not list.

Facts: compressed-tensors, quantization/quant_args.py and quant_config.py; transformers,
utils/quantization_config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from weights.config import BLOCK, Form, Forms, LayerKind
from weights.errors import Problems
from weights.families.experts import check_blocks
from weights.families.family import Family
from weights.fields import Fields
from weights.ignored import Ignored
from weights.report import Log


class Rule(NamedTuple):
    """Which values a key may have. allowed: None: any, since it changes no arithmetic."""

    allowed: tuple[object, ...] | None
    default: object = None  # where the key is absent
    why: str = ""


Rules = Mapping[str, Rule]
KEY = "quantization_config"
ANY = Rule(None)
SQUARE = Rule(([BLOCK, BLOCK],), None, f"[{BLOCK}, {BLOCK}] is needed")
CACHE = Rule((None,), None, "the cache stays 16 bits")
UNPACKED = Rule((False, None), False, "weights stay packed")
METHODS: dict[str, Rules] = {
    "mxfp4": {"modules_to_not_convert": ANY, "dequantize": UNPACKED},
    "fp8": {
        "activation_scheme": Rule(("dynamic",), "dynamic", "only scales of their own row are read"),
        "weight_block_size": SQUARE,
        "fmt": Rule(("e4m3",), "e4m3"),
        "scale_fmt": Rule(("float", None), None, "scales of 16 or 32 bits are needed"),
        "expert_dtype": Rule(("fp8",), "fp8"),
        "modules_to_convert": Rule((None, []), None, "embeddings stay 16 bits"),
        **{"kv_cache_scheme": CACHE, "dequantize": UNPACKED},
        **{"modules_to_not_convert": ANY, "ignored_layers": ANY},
    },
    "compressed-tensors": {
        "format": Rule(("float-quantized",), None, "only float-quantized is read"),
        "kv_cache_scheme": CACHE,
        "transform_config": Rule((None, {})),
        **{"config_groups": ANY, "ignore": ANY, "quantization_status": ANY, "version": ANY},
        **{"global_compression_ratio": ANY, "sparsity_config": ANY},
    },
}
GROUP: Rules = {
    "targets": Rule((["Linear"],), None, "['Linear'] is needed"),
    "format": Rule((None, "float-quantized")),
    "output_activations": Rule((None,)),
    **{"weights": ANY, "input_activations": ANY},
}
NUMBERS: Rules = {
    "num_bits": Rule((8,), 8, "8 bits are needed"),
    "type": Rule(("float",), "int", "FP8 is needed"),
    "symmetric": Rule((True,), True),
    "actorder": Rule((None,)),
    **dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"), ANY),
}
STATIC = Rule((False,), False)
DYNAMIC = Rule((True,), False, "static scales are not read")
# by the strategy of weights: the form, what else they say, and what activations do
STRATEGIES: dict[object, tuple[Form, Rules, Rules]] = {
    "channel": (
        "fp8 channel",
        {"strategy": ANY, "group_size": Rule((None, -1)), "block_structure": Rule((None,))},
        {
            "strategy": Rule(("token",), None, "other scales than a row's depend on other rows"),
            **{"group_size": Rule((None, -1)), "block_structure": Rule((None,))},
        },
    ),
    "block": (
        "fp8 block",
        {"strategy": ANY, "group_size": Rule((None,)), "block_structure": SQUARE},
        {
            "strategy": Rule(("group",), None, f"with blocks, groups of {BLOCK} are needed"),
            **{"group_size": Rule((BLOCK,)), "block_structure": Rule((None,))},
        },
    ),
}
PARTS = {  # of each product, by their names in files
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The form that products have which are not ignored. names: of modules in files, by ours."""

    form: Form
    ignored: Ignored
    names: Mapping[str, str]
    source: str
    problems: Problems

    def of_layer(self, kind: LayerKind, i: int) -> LayerKind:
        """Give the kind of layer i with the forms of its products."""
        prefix = f"layers.{i}."
        products = [name for name in PARTS if kind.experts is None or "self_attn" in PARTS[name][0]]
        forms = {name: self._form_of([prefix + part for part in PARTS[name]]) for name in products}
        experts = kind.experts
        if experts is not None:
            each = [f"{prefix}mlp.experts.{e}.{x}" for e in range(experts.num) for x in OF_EXPERTS]
            experts = replace(experts, form=self._form_of(each))
        return replace(kind, forms=Forms(**forms), experts=experts)

    def _form_of(self, parts: list[str]) -> Form:
        """Find the form that all parts of a product have; a problem if they differ."""
        names = [self.names.get(part, f"model.{part}") for part in parts]
        plain = [name for name in names if name in self.ignored]
        if not plain:
            return self.form
        if len(plain) < len(names):
            other = next(name for name in names if name not in plain)
            line = f"{plain[0]} is plain and {other} is {self.form}: one product needs one form"
            self.problems.add(f"{self.source}: {line}")
        return "plain"


def with_forms(
    layers: tuple[LayerKind, ...],
    fields: Fields,
    family: Family,
    names: Mapping[str, str],
    log: Log,
) -> tuple[LayerKind, ...]:
    """Give the layers with the forms of their products; those that are alike share a kind.

    names: of the modules in files, by ours; "model." and ours, where one is not there
    """
    form, ignored = _read(fields, family)
    if form == "plain":
        return layers
    source = fields.source(KEY)
    if form == "mxfp4":  # of experts alone, whatever is listed; tensors show what is not converted
        changed = [_with_packed(kind, fields, family) for kind in layers]
    else:
        quantisation = Quantisation(form, ignored, names, source, fields.problems)
        changed = [quantisation.of_layer(kind, i) for i, kind in enumerate(layers)]
        everything = {*names.values(), "lm_head", "model.embed_tokens"}
        for module in everything:
            _ = module in ignored
        for entry in ignored.unused:
            log.note(f"{source}: {entry!r:.80} fits no module")
    shared = {kind: kind for kind in changed}
    _report(changed, source, log)
    return tuple(shared[kind] for kind in changed)


def _with_packed(kind: LayerKind, fields: Fields, family: Family) -> LayerKind:
    if kind.experts is None or family.experts is None:
        return kind
    check_blocks(fields, kind.hidden_size, family.experts.width, kind.experts.width)
    return replace(kind, experts=replace(kind.experts, form="mxfp4"))


def _report(layers: list[LayerKind], source: str, log: Log) -> None:
    """Log the form of each product."""
    for product in PARTS:
        found = [getattr(kind.forms, product) for kind in layers if _has(kind, product)]
        if found and {*found} != {"plain"}:
            log.add(product, _counted(found), source)
    of_experts = [kind.experts.form for kind in layers if kind.experts is not None]
    if of_experts:
        log.add("expert_form", _counted(of_experts), source)


def _has(kind: LayerKind, product: str) -> bool:
    return kind.experts is None or product in ("qkv_proj", "o_proj")


def _counted(forms: list[Form]) -> str:
    """Write "fp8 block", or "fp8 block in 30 of 32 layers, plain in 2 of 32 layers"."""
    each = dict.fromkeys(forms)
    if len(each) == 1:
        return forms[0]
    return ", ".join(f"{form} in {forms.count(form)} of {len(forms)} layers" for form in each)


def _read(fields: Fields, family: Family) -> tuple[Form, Ignored]:
    """Read what products have for a form, and which are left plain."""
    if KEY not in fields:
        return "plain", Ignored()
    source, value = fields.source(KEY), fields.values[KEY]
    method = value.get("quant_method") if isinstance(value, dict) else None
    rules = METHODS.get(method) if isinstance(method, str) else None
    if not isinstance(value, dict) or rules is None or not _takes(family, str(method)):
        fields.problems.add(f"{source} {value!r:.80} is not supported", fatal=True)
        return "plain", Ignored()
    problems = fields.problems
    if not _check(source, value, {"quant_method": ANY, **rules}, problems):
        return "plain", Ignored()
    if method == "mxfp4":
        return "mxfp4", Ignored()
    form: Form = "fp8 block"
    keys: tuple[str, ...] = ("modules_to_not_convert", "ignored_layers")
    if method == "compressed-tensors":
        keys = ("ignore",)
        form = _form_of_groups(f"{source}.config_groups", value.get("config_groups"), problems)
        _check_sparsity(source, value.get("sparsity_config"), problems)
    found = [entry for key in keys for entry in _strings(source, key, value, problems)]
    try:
        return form, Ignored(found, has_parts=method == "fp8")
    except ValueError as error:
        problems.add(f"{source}.{keys[0]}: {error}", fatal=True)
        return "plain", Ignored()


def _takes(family: Family, method: str) -> bool:
    """Say whether weights of this family are read in a form that the method has."""
    return method in family.forms if method == "mxfp4" else "fp8 block" in family.forms


def _form_of_groups(source: str, groups: object, problems: Problems) -> Form:
    if not isinstance(groups, dict) or len(groups) != 1:
        what = f"has {len(groups)} groups" if isinstance(groups, dict) else f"is {groups!r:.80}"
        problems.add(f"{source} {what}, one group is needed", fatal=True)
        return "plain"
    [(name, group)] = groups.items()
    source = f"{source}.{name}"
    if not _check(source, group, GROUP, problems):
        return "plain"
    weights, activations = group.get("weights"), group.get("input_activations")
    strategy = weights.get("strategy") if isinstance(weights, dict) else None
    if strategy not in ("channel", "block"):
        line = f"weights.strategy {strategy!r:.80} is not supported: channel or block is needed"
        problems.add(f"{source}.{line}", fatal=True)
        return "plain"
    form, of_weights, of_activations = STRATEGIES[strategy]
    rules = {**NUMBERS, **of_weights, "dynamic": STATIC}
    if _check(f"{source}.weights", weights, rules, problems):
        rules = {**NUMBERS, **of_activations, "dynamic": DYNAMIC}
        _check(f"{source}.input_activations", activations, rules, problems)
    return form


def _check(source: str, value: object, rules: Rules, problems: Problems) -> bool:
    """Refuse keys without a rule and values that theirs does not allow; False: some were."""
    if not isinstance(value, dict):
        problems.add(f"{source} is {value!r:.80}, an object is needed", fatal=True)
        return False
    wrong = {key: ANY for key in value if key not in rules}
    for key, rule in rules.items():
        if rule.allowed is not None and value.get(key, rule.default) not in rule.allowed:
            wrong[key] = rule
    for key, rule in wrong.items():
        found = value.get(key, rule.default)
        line = f"{source}.{key} {found!r:.80} is not supported"
        problems.add(f"{line}: {rule.why}" if rule.why else line, fatal=True)
    return not wrong


def _check_sparsity(source: str, value: object, problems: Problems) -> None:
    """Refuse weights of which some are left out; "dense" only says how many are 0."""
    if value and not (isinstance(value, dict) and value.get("format") == "dense"):
        problems.add(f"{source}.sparsity_config {value!r:.80} is not supported", fatal=True)


def _strings(source: str, key: str, values: Mapping[str, object], problems: Problems) -> list[str]:
    found = values.get(key) or []
    if isinstance(found, list) and all(isinstance(each, str) for each in found):
        return found
    problems.add(f"{source}.{key} is {found!r:.80}, a list of strings is needed", fatal=True)
    return []
