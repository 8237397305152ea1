"""The table and the JSON of what tuning found."""

import math

from specdec.kernels.tables import key_of
from specdec.tune.search import Measured

HEAD = f"{'product':<20} {'splits':>6} {'rows':>5} {'by rule':>10} {'tuned':>10} {'cuBLAS':>10}"


def table(measured: Measured) -> str:
    """Write a line for every row class, in microseconds."""
    name = str(measured.product)
    return "\n".join(
        f"{name:<20} {measured.splits:>6} {rows:>5} "
        f"{best.rule_us:>10.1f} {best.us:>10.1f} {best.cublas_us:>10.1f}"
        for rows, best in sorted(measured.rows.items())
    )


def as_json(measured: Measured) -> dict[str, object]:
    """List the times of all candidates: [rows, splits, tiles, microseconds]; None: did not run."""
    rows = {
        str(rows): best._asdict()
        | {"rule_us": finite(best.rule_us), "cublas_us": finite(best.cublas_us)}
        for rows, best in sorted(measured.rows.items())
    }
    times = [[*key[:2], list(key[2]), us] for key, us in measured.times.items() if us < math.inf]
    return {
        "product": key_of(measured.product),
        "splits": measured.splits,
        "rows": rows,
        "times": times,
    }


def finite(value: float) -> float | None:
    """Replace what JSON has no number for by None."""
    return value if math.isfinite(value) else None
