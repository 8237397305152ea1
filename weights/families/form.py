"""The form of a target's weights, from quantization_config: only what its family has is read."""

from weights.config import Form
from weights.families.family import Family
from weights.fields import Fields
from weights.report import Log

KEY = "quantization_config"
# keys beside quant_method that may be there: tensors say which modules are not converted
IGNORED = ("modules_to_not_convert", "dequantize")


def read_form(fields: Fields, family: Family, log: Log) -> Form:
    """Read the form of the experts' weights; other quantised weights are a problem."""
    form: Form = "plain"
    if KEY in fields:
        form = _quantised(fields, family)
    if len(family.forms) > 1:
        log.add("expert_form", form, fields.source(KEY))
    return form


def _quantised(fields: Fields, family: Family) -> Form:
    value = fields.values[KEY]
    method = value.get("quant_method") if isinstance(value, dict) else None
    form = next((form for form in family.forms if form == method and form != "plain"), None)
    if form is None:
        fields.problems.add(f"{fields.source(KEY)} {value!r:.80} is not supported")
        return "plain"
    assert isinstance(value, dict), "it has a quant_method"
    for key in value.keys() - {"quant_method", *IGNORED}:
        fields.problems.add(f"{fields.source(KEY)}.{key} {value[key]!r:.80} is not supported")
    if value.get("dequantize"):
        fields.problems.add(
            f"{fields.source(KEY)}.dequantize is not supported: weights stay packed"
        )
    return form
