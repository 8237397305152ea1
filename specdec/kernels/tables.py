"""Measured tiles: the shipped table and the user's own, one product per line.

    {"NVIDIA H200": {
     "split,4096,4096,bfloat16": {"parts": 2, "rows": {"16": [64, 16, 256, 3, 4], "32": ...}},

A list is a Shape, whose last number may be left out. The user's table is tiles.json in the cache
directory; its numbers of parts say what was measured and decide nothing (tiles.py). An earlier
version called them splits. Where the last number is RELAY, one measured a kernel that is gone: the
list is left out, and a line of the log says so.
"""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from specdec.kernels.tile_shapes import (
    KINDS,
    PARTS,
    ROW_CLASSES,
    TABLE_DTYPES,
    Product,
    Shape,
    problem_of,
)


class Entry(NamedTuple):
    """What was measured of one product: the best number of parts, and its tiles by row class."""

    parts: int
    rows: Mapping[int, Shape]


Table = dict[str, dict[Product, Entry]]  # by the GPU's name
NONE = Entry(1, {})
RELAY = -1  # in place of cuts
OLD_NAME = "splits"  # of parts
logger = logging.getLogger("specdec")


@cache
def shipped_table() -> Table:
    file = files("specdec.kernels") / "tuned.json"
    return parse_table(file.read_text(), "tuned.json", "reinstall specdec")


@cache
def user_table() -> Table:
    """Read what `specdec tune` has written; empty if there is none. ValueError: no valid table."""
    return read_table(user_file())


def user_file() -> Path:
    """Find the user's table: in $SPECDEC_CACHE_DIR, or specdec in the user's cache directory."""
    own = os.environ.get("SPECDEC_CACHE_DIR")
    if own:
        return Path(own) / "tiles.json"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "specdec" / "tiles.json"


def read_table(file: Path) -> Table:
    """Read a table on disk, checked; empty if there is no file."""
    advice = "correct the file, or delete it and run `specdec tune` again"
    try:
        return parse_table(file.read_text(encoding="utf-8"), str(file), advice)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; make it readable, or delete it") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not a valid table of tiles: not UTF-8; {advice}") from error


def write_table(file: Path, table: Table) -> None:
    """Replace the file in one step, so that an interrupt leaves the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as out:
        try:
            out.write(format_table(table))
            out.close()
            os.chmod(out.name, 0o644)
            os.replace(out.name, file)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise


def format_table(table: Table) -> str:
    """Write a table as text, GPUs and products in their order."""
    gpus = []
    for gpu, entries in table.items():
        lines = [f' "{key_of(product)}": {_line(entry)}' for product, entry in entries.items()]
        gpus.append(f"{json.dumps(gpu)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(gpus) + "\n}\n"


def _line(entry: Entry) -> str:
    """Leave out a list's last number where it is 0, as nearly everywhere."""
    rows = {
        str(rows): list(shape if shape.cuts else shape[:-1])
        for rows, shape in sorted(entry.rows.items())
    }
    return json.dumps({"parts": entry.parts, "rows": rows})


def key_of(product: Product) -> str:
    """Name a product as a table does: "split,4096,4096,bfloat16"."""
    return ",".join(map(str, product))


def parse_table(text: str, name: str, advice: str) -> Table:
    """ValueError says what is wrong in `name` and gives the advice."""
    relays: list[str] = []
    try:
        table = {
            gpu: dict(_entry(key, value, relays) for key, value in _object(entries, gpu).items())
            for gpu, entries in _object(json.loads(text), "top level").items()
        }
    except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
        raise ValueError(f"{name}: not a valid table of tiles: {error}; {advice}") from error
    if relays:
        _log_relays(name, len(relays))
    return table


@cache
def _log_relays(name: str, count: int) -> None:
    """Log once that lists are left out, however often the table is read."""
    logger.warning(
        "%s: %d tiles of a kernel that is gone (cuts %d) are left out, and others are chosen; "
        "`specdec tune` measures them",
        name,
        count,
        RELAY,
    )


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {_shown(value)} is not an object")
    return value


def _entry(key: str, value: object, relays: list[str]) -> tuple[Product, Entry]:
    """Check an entry. relays: where lists are left out, to which its own are added."""
    product = _product(key)
    fields = _object(value, key)
    unknown = [name for name in fields if name not in (*Entry._fields, OLD_NAME)]
    if unknown:
        raise ValueError(f"{key}: field {_shown(unknown[0])}, allowed are parts, rows")
    parts = fields.get("parts", fields.get(OLD_NAME, 1))
    allowed = PARTS if product.kind == "split" else (1,)
    if type(parts) is not int or parts not in allowed:
        expected = ", ".join(map(str, allowed))
        raise ValueError(f"{key}: parts {_shown(parts)}, allowed are {expected}")
    rows = _object(fields.get("rows"), f"{key}: rows")
    most = len(Shape._fields)
    gone = [name for name, x in rows.items() if isinstance(x, list) and x[most - 1 :] == [RELAY]]
    relays += gone
    kept = (name for name in rows if name not in gone)
    return product, Entry(parts, dict(_shape(product, key, name, rows[name]) for name in kept))


def _product(key: str) -> Product:
    kind, N, K, dtype, *rest = [*key.split(","), "", "", ""]
    known = next((each for each in KINDS if each == kind), None)
    is_complete = N.isdecimal() and K.isdecimal() and dtype in TABLE_DTYPES and not any(rest)
    if known is None or not is_complete or min(int(N), int(K)) == 0:
        allowed = f"{'|'.join(KINDS)},N,K,{'|'.join(TABLE_DTYPES)}"
        raise ValueError(f"product {_shown(key)}, a name is {allowed}")
    return Product(known, int(N), int(K), dtype)


def _shape(product: Product, key: str, name: str, value: object) -> tuple[int, Shape]:
    """Check the tiles of a row class, and return both."""
    rows = {str(each): each for each in ROW_CLASSES}.get(name)
    if rows is None:
        classes = ", ".join(map(str, ROW_CLASSES))
        raise ValueError(f"{key}: rows {_shown(name)}, the classes are {classes}")
    where = f"{key}, rows {rows}"
    if not isinstance(value, list) or {type(each) for each in value} != {int}:
        raise ValueError(f"{where}: {_shown(value)} is no list of integers")
    most = len(Shape._fields)
    least = most - len(Shape._field_defaults)
    if not least <= len(value) <= most:
        raise ValueError(f"{where}: {_shown(value)}, {least} numbers are needed")
    shape = Shape(*value)
    problem = problem_of(product, rows, shape)
    if problem is not None:
        raise ValueError(f"{where}: {problem}")
    return rows, shape


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
