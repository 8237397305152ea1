"""Names that a config demands against names that the files hold: missing, unexpected and misshapen, all at once."""

from weights.errors import Problems
from weights.header import FLOAT_DTYPES, INTEGER_DTYPES, TensorEntry
from weights.shapes import Shapes

QUANTISED = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "input_scale",
)


def check_binding(wanted: Shapes, held: dict[str, TensorEntry], directory_name: str, problems: Problems) -> None:
    """held: tensors by the names used here; each problem names the file and the key in it."""
    for name, shape in wanted.items():
        if name not in held:
            problems.add(f"{directory_name}: missing {name} {list(shape)}")
        elif held[name].shape != shape:
            entry = held[name]
            problems.add(f"{entry.file.name}: {entry.name} is {list(entry.shape)}, {list(shape)} is needed")
    for name, entry in held.items():
        if name not in wanted:
            problems.add(f"{entry.file.name}: unexpected {entry.name} {list(entry.shape)}")


def check_dtypes(held: dict[str, TensorEntry], problems: Problems) -> None:
    """Weights must be plain floating point; d2t and t2d are the only tables of integers."""
    for name, entry in held.items():
        allowed = {"d2t": INTEGER_DTYPES, "t2d": {"BOOL"}}.get(name, FLOAT_DTYPES)
        where = f"{entry.file.name}: {entry.name} is {entry.dtype}"
        if name.rpartition(".")[2] in QUANTISED:
            problems.add(f"{where}: quantised weights are not supported")
        elif entry.dtype not in allowed:
            kind = {"d2t": "integers are needed", "t2d": "BOOL is needed"}.get(
                name, "packed, fp8 and integer weights are not supported"
            )
            problems.add(f"{where}: {kind}")
