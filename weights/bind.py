"""The names a config demands against those that files hold: missing, unexpected, misshapen."""

from collections.abc import Container, Mapping

from weights.errors import Problems
from weights.files.header import FLOAT_DTYPES, INTEGER_DTYPES, TensorEntry
from weights.shapes import Shapes

QUANTISED = {
    *("weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_zero_point"),
    *("weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx", "input_scale"),
}
# allowed dtypes and the words for them: of weights, and of other tensors
WEIGHT = (FLOAT_DTYPES, "packed, fp8 and integer weights are not supported")
TABLES: dict[str, tuple[Container[str], str]] = {
    "d2t": (INTEGER_DTYPES, "integers are needed"),
    "t2d": ({"BOOL"}, "BOOL is needed"),
}
MOST_FILES = 4  # of those that lack a tensor, in its line


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


def check_dtypes(held: Mapping[str, TensorEntry], problems: Problems) -> None:
    """Weights must be plain floating point; d2t and t2d are the only other tensors."""
    for name, entry in held.items():
        if problems.is_full:
            return
        allowed, words = TABLES.get(name, WEIGHT)
        if _is_quantised(name) or entry.dtype not in allowed:
            problems.add(f"{entry.where} is {entry.dtype}: {words}")


def file_names(held: Mapping[str, TensorEntry]) -> str:
    """The files that hold the tensors, the first few by name: where a missing one is missing."""
    files = sorted({entry.file.name for entry in held.values()})
    rest = f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""
    return ", ".join(files[:MOST_FILES]) + rest


def _is_quantised(name: str) -> bool:
    return name.rpartition(".")[2] in QUANTISED
