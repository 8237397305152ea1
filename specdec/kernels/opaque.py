"""Functions that torch.compile does not look into: each call is one op of its graph.

Eager code calls the function itself. An op takes tensors and numbers only, so a tuple's fields
become its arguments, and where the tuple may be None each of them may.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_TYPES: dict[object, str] = {
    **{Tensor: "Tensor", int: "int", bool: "bool", float: "float"},
    torch.dtype: "ScalarType",
}
_RESULTS: dict[object, str] = {
    **{Tensor: "Tensor", tuple[Tensor, Tensor]: "(Tensor, Tensor)"},
    tuple[Tensor, Tensor, Tensor]: "(Tensor, Tensor, Tensor)",
    tuple[Tensor, Tensor, Tensor, Tensor]: "(Tensor, Tensor, Tensor, Tensor)",
    type(None): "()",
}


def opaque(
    fake: Callable[..., object] | None = None, writes: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make the function the op specdec::<its name> where torch.compile meets it.

    fake:   from the same arguments, empty tensors like the results; None: there are none
    writes: the parameter that is written in place
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        hints = get_type_hints(fn)
        parameters = [
            _parameter(p.name, hints[p.name], p.default, p.name == writes)
            for p in inspect.signature(fn).parameters.values()
        ]
        arguments = ", ".join(each for parameter in parameters for each in parameter.arguments)
        op = torch.library.custom_op(
            f"specdec::{fn.__name__.lstrip('_')}",
            lambda *flat: cast(Callable[..., R], fn)(*_joined(parameters, flat)),
            mutates_args=() if writes is None else (writes,),
            schema=f"({arguments}) -> {_RESULTS[hints['return']]}",
        )
        if fake is not None:
            op.register_fake(lambda *flat: fake(*_joined(parameters, flat)))

        @functools.wraps(fn)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return cast(R, op(*_spread(parameters, args, kwargs)))
            return fn(*args, **kwargs)

        return wrapper

    return decorate


class _Parameter(NamedTuple):
    """A parameter of the function, and what it is to the op."""

    name: str
    default: object
    arguments: tuple[str, ...]  # of the op, as in its schema: "Tensor? x_bias_N"
    join: Callable[[Sequence[object]], object] | None  # makes the tuple of their values, if any


def _parameter(name: str, hint: object, default: object, is_written: bool) -> _Parameter:
    kind, is_optional = _without_none(hint)
    join: Callable[[Sequence[object]], object] | None = None
    if kind in _TYPES:
        fields = {name: kind}
    elif get_origin(kind) is tuple:
        fields = {f"{name}_{i}": item for i, item in enumerate(get_args(kind))}
        join = tuple
    else:
        named = cast(type[NamedTuple], kind)
        fields = {f"{name}_{field}": item for field, item in get_type_hints(named).items()}
        join = named._make
    arguments = []
    for argument, item in fields.items():
        kind, may_be_none = _without_none(item)
        mark = "(a!)" * is_written + "?" * (is_optional or may_be_none)
        arguments.append(f"{_TYPES[kind]}{mark} {argument}")
    return _Parameter(name, default, tuple(arguments), join)


def _without_none(hint: object) -> tuple[object, bool]:
    """Split `hint` into X and whether it is X | None."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return (kinds[0], True) if type(None) in get_args(hint) else (hint, False)


def _spread(
    parameters: Sequence[_Parameter], args: Sequence[object], kwargs: dict[str, object]
) -> list[object]:
    flat: list[object] = []
    for i, parameter in enumerate(parameters):
        value = args[i] if i < len(args) else kwargs.get(parameter.name, parameter.default)
        # a named tuple added to a list is what torch 2.11 cannot trace
        flat.extend(value if isinstance(value, tuple) else [value] * len(parameter.arguments))
    return flat


def _joined(parameters: Sequence[_Parameter], flat: Sequence[object]) -> list[object]:
    rest = iter(flat)
    found: list[object] = []
    for parameter in parameters:
        values, join = [next(rest) for _ in parameter.arguments], parameter.join
        found.append(values[0] if join is None or values[0] is None else join(values))
    return found
