"""The check that SPECDEC_DEBUG=1 turns on: a replay must be given the addresses of its capture.

A field of a dataclass whose metadata has "live" is left out: what runs between
pieces reads it anew.
"""

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from torch import Tensor

from graphs.context import ForwardContext
from graphs.protocol import CaptureError


def debug_enabled() -> bool:
    return os.environ.get("SPECDEC_DEBUG") == "1"


def addresses(
    args: tuple[object, ...], kwargs: dict[str, object], context: ForwardContext
) -> dict[str, int]:
    """The address of each tensor that a call reads, in its arguments and in its forward context."""
    named = {f"args[{i}]": value for i, value in enumerate(args)} | kwargs
    named |= {"slot_mapping": context.slot_mapping, "attn_metadata": context.attn_metadata}
    found = (pair for name, value in named.items() for pair in _walk(name, value))
    return {path: tensor.data_ptr() for path, tensor in found}


def check_addresses(captured: dict[str, int], now: dict[str, int]) -> None:
    """CaptureError names every argument whose address is not that of the capture."""
    changed = [
        f"{name}: {_hex(captured.get(name))} at capture, {_hex(now.get(name))} now"
        for name in sorted(captured.keys() | now.keys())
        if captured.get(name) != now.get(name)
    ]
    if changed:
        differences = "; ".join(changed)
        raise CaptureError(f"a graph replays the addresses of its capture, but {differences}")


def _walk(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(f"{path}[{key!r}]", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.metadata.get("live"):
                continue
            yield from _walk(f"{path}.{field.name}", getattr(value, field.name))
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            if isinstance(item, Tensor | list | tuple | dict):
                yield from _walk(f"{path}.{name}", item)


def _hex(address: int | None) -> str:
    return "no tensor" if address is None else hex(address)
