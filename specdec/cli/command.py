"""Commands from dataclasses: each field is an option, a config's class stands for all of its own.

    declare(app, "generate", GenerateOptions, run_generate)

A field of type Annotated[T, EngineConfig] gets the options of EngineConfig that this command takes,
as keyword arguments without those that were left out; before_torch.py checks them. A dataclass as a
type adds its fields. Fields without a description get what the command's caller passed as `obj`.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any, cast, get_args

from typer import Argument, CallbackParam, Context, Option, Typer

from specdec.arguments import from_mapping
from specdec.cli.readers import check_choice, num_drafts, numbers, pairs, text_of, trees
from specdec.described import Described, check_described, described
from specdec.sizes import TreeShape
from specdec.speculative_config import SpeculativeConfig

Read = Callable[[str, str], object]
# what reads the text of an option of this type; the others are typer's own
READERS: dict[object, Read] = {
    int | str: num_drafts,
    Mapping[str, str] | None: pairs,
    Sequence[TreeShape] | None: trees,
}
LISTS: dict[object, Any] = {Sequence[int] | None: int, Sequence[float] | None: float}


def declare(app: Typer, name: str, kind: Any, run: Callable[[Any], None]) -> None:
    """Add a command that calls `run` with what the user chose, an instance of `kind`.

    The docstring of `kind` is the help of the command, its first sentence that in the list.
    """

    def call(context: Context, **given: object) -> None:
        run(_built(kind, name, {**given, **context.obj}))

    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=Context)]
    parameters += [_parameter(each, name) for each in _options(kind, name)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    about = inspect.cleandoc(kind.__doc__)
    app.command(name, short_help=re.split(r"(?<=\.)\s", about)[0], help=about)(call)


def taken_by(name: str, config: object) -> list[Described]:
    """List the options of a config that a command takes."""
    return [each for each in described(config) if name in each.commands]


def parameter_name(each: Described) -> str:
    """Return what the command line calls a field; of --draft-top-k it is draft_top_k."""
    return each.flag.split("/")[0].removeprefix("--").replace("-", "_")


def _options(kind: Any, name: str) -> Iterator[Described]:
    """List all options of a command, each with the name of its parameter."""
    own = {each.name: each for each in described(kind)}
    for each in fields(kind):
        config = _config_of(each.type)
        if config is not None:
            taken = taken_by(name, config)
            yield from (replace(one, name=parameter_name(one)) for one in taken)
        elif is_dataclass(each.type):
            yield from _options(each.type, name)
        elif each.name in own:
            yield own[each.name]


def _config_of(kind: object) -> Any:
    """Find the config in Annotated[T, config]; None if there is none."""
    return next((mark for mark in get_args(kind)[1:] if is_dataclass(mark)), None)


def _parameter(each: Described, command: str) -> Parameter:
    shown = "what the command needs" if command in each.planned_by else each.unset
    default = None if shown or each.default in (MISSING, ()) else each.default
    if _is_switch(each):
        default, shown = False, ""
    elif each.words:
        default = next(word for word, value in each.words.items() if value == each.default)
    elif each.type == int | str:
        default, shown = None, str(each.default)  # so that it is known whether one was given
    rest: dict[str, Any] = {
        "help": each.help,
        "show_default": shown or True,
        "callback": _callback(each),
        "file_okay": "DIRECTORY" not in (each.metavar, each.argument),
        "exists": each.exists,
    }
    if each.argument:
        default = ... if each.default is MISSING else default
        info = Argument(default, metavar=each.argument, **rest)
    else:
        rest |= {"metavar": each.metavar, "envvar": each.envvar}
        info = Option(default, *filter(None, (each.flag, each.short)), **rest)
    return Parameter(each.name, Parameter.KEYWORD_ONLY, annotation=_kind(each), default=info)


def _callback(each: Described) -> Callable[..., object] | None:
    read = text_of if each.metavar == "FILE" else READERS.get(each.type)
    if each.type in LISTS:
        read = partial(numbers, LISTS[each.type], each.bounds)
    if read is None:
        return None

    def call(option: CallbackParam, text: str | None) -> object:
        return None if text is None else read(option.opts[0], text)

    return call


def _kind(each: Described) -> object:
    """Choose a type that typer reads: no unions, and no collections but lists."""
    if each.words:
        return str
    if _is_switch(each):
        return bool
    if each.type == tuple[str, ...]:
        return list[str] | None
    plain = (bool, int, float, Path)
    own = [kind for kind in plain if each.type in (kind, kind | None)]
    return (own[0] if own else str) | None


def _is_switch(each: Described) -> bool:
    """Say whether its option has neither a value nor an opposite."""
    return each.type in (bool, bool | None) and not each.words and "/" not in each.flag


def _built(kind: Any, name: str, given: Mapping[str, object]) -> Any:
    own = {each.name: each for each in described(kind)}
    values: dict[str, object] = {}
    for each in fields(kind):
        config = _config_of(each.type)
        if config is not None:
            taken = taken_by(name, config)
            chosen = {one.name: _value(one, given[parameter_name(one)]) for one in taken}
            chosen = {name: value for name, value in chosen.items() if value is not None}
            is_draft = get_args(each.type)[0] == SpeculativeConfig | None
            values[each.name] = speculation_of(chosen) if is_draft else chosen
        elif each.name in own:
            values[each.name] = _value(own[each.name], given[each.name])
        elif each.name in given:
            values[each.name] = given[each.name]
        else:
            values[each.name] = _built(each.type, name, given)
    built = kind(**values)
    check_described(built)
    return built


def _value(each: Described, given: object) -> object:
    if each.words:
        check_choice(each.flag, str(given), tuple(each.words))
        return each.words[str(given)]
    if each.type == tuple[str, ...]:
        return tuple(cast(list[str], given or ())) or None
    turned = not each.default if each.gives is None else each.gives
    return given if not _is_switch(each) else turned if given else each.default


def speculation_of(given: Mapping[str, object]) -> SpeculativeConfig | None:
    """Build the config of the draft. Without a draft, refuse the options that need one."""
    if "model" not in given:
        for each in described(SpeculativeConfig):
            is_count = each.name == "num_speculative_tokens"  # 0 is plain decoding, auto is not
            if each.name in given and given[each.name] != (0 if is_count else each.default):
                value = "" if each.gives is not None else f" {given[each.name]}"
                raise ValueError(f"{each.flag}{value} without a draft: give --draft too")
        return None
    try:
        return from_mapping(SpeculativeConfig, given)
    except ValueError as error:
        raise ValueError(_renamed(str(error))) from error


def _renamed(text: str) -> str:
    """Put the command line's names into an error: --top-k and --revision are other things there."""
    for each in described(SpeculativeConfig):
        if each.flag == f"--draft-{each.name.replace('_', '-')}":
            text = re.sub(rf"\b{each.name}\b", f"draft_{each.name}", text)
    return text
