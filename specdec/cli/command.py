"""Commands from dataclasses: each field is an option, a config's class stands for all of its own.

    @command(app, "Continue a prompt.")
    def generate(options: GenerateOptions) -> None: ...

A field of type Annotated[T, EngineConfig] gets the options of EngineConfig that this command takes,
checked, as keyword arguments without those that were left out. A dataclass as a type adds its
fields, Annotated[T, Argument(...)] is typer's own, and Wording and CommandLine are the command's.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NewType, TypeVar, cast, get_args, get_origin

from typer import Argument, Context, Option, Typer

from specdec.arguments import from_mapping
from specdec.cli.options import (
    check_choice,
    floats,
    integers,
    num_drafts,
    pairs,
    text_of,
    trees,
    wording_of,
)
from specdec.cli.speculation import speculation_of
from specdec.cli.wording import Wording
from specdec.config import EngineConfig
from specdec.described import Described, check_described, described
from specdec.serve.http.options import ServerOptions
from specdec.sizes import TreeShape
from specdec.speculative_config import SpeculativeConfig

Options = TypeVar("Options")
CommandLine = NewType("CommandLine", str)  # the whole of it, without keys
# what reads the text of an option of this type; the others are typer's own
READERS: dict[object, Callable[..., object]] = {
    int | str: num_drafts,
    Mapping[str, str] | None: pairs,
    Sequence[TreeShape] | None: trees,
}
LISTS: dict[object, Callable[..., Callable[..., object]]] = {
    Sequence[int] | None: integers,
    Sequence[float] | None: floats,
}


def command(
    app: Typer, short_help: str
) -> Callable[[Callable[[Options], None]], Callable[[Options], None]]:
    """Decorate the function of a command, whose argument is what the user chose."""

    def declare(run: Callable[[Options], None]) -> Callable[[Options], None]:
        name = run.__name__
        kind = inspect.signature(run).parameters["options"].annotation

        def call(context: Context, **given: object) -> None:
            own: dict[object, object] = {Wording: wording_of(context), CommandLine: context.obj}
            run(_built(kind, name, given, own))

        parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=Context)]
        parameters += _parameters(kind, name)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name, short_help=short_help, help=inspect.getdoc(run))(call)
        return run

    return declare


def taken_by(name: str, config: object) -> list[Described]:
    """List the options of a config that a command takes."""
    return [each for each in described(config) if name in each.commands]


def parameter_name(each: Described) -> str:
    """Return what the command line calls a field; of --draft-top-k it is draft_top_k."""
    return each.flag.split("/")[0].removeprefix("--").replace("-", "_")


def _parameters(kind: Any, name: str) -> Iterator[Parameter]:
    own = {each.name: each for each in described(kind)}
    for each in fields(kind):
        config = _config_of(each.type)
        if config is not None:
            yield from (
                _parameter(one, parameter_name(one), name) for one in taken_by(name, config)
            )
        elif is_dataclass(each.type):
            yield from _parameters(each.type, name)
        elif each.name in own:
            yield _parameter(own[each.name], each.name, name)
        elif each.type not in (Wording, CommandLine):
            default = Parameter.empty if each.default is MISSING else each.default
            keyword = Parameter.KEYWORD_ONLY
            yield Parameter(each.name, keyword, annotation=each.type, default=default)


def _config_of(kind: object) -> Any:
    """Find the config in Annotated[T, config]; None if there is none."""
    marks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, type)), None)


def _parameter(each: Described, name: str, command: str) -> Parameter:
    """Describe an option to typer. name: of its value among those that were given."""
    kind = _kind(each)
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
        "callback": _reader(each),
    }
    if each.argument:
        default = ... if each.default is MISSING else default
        info = Argument(default, metavar=each.argument, **rest)
    else:
        rest |= {"metavar": each.metavar, "envvar": each.envvar, "file_okay": kind != Path | None}
        info = Option(default, *filter(None, (each.flag, each.short)), **rest)
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=info)


def _reader(each: Described) -> Callable[..., object] | None:
    """Choose what reads the text of an option, if that is not typer."""
    if each.metavar == "FILE":
        return text_of
    if each.type in LISTS:
        return LISTS[each.type](*(each.bounds or ()))
    return READERS.get(each.type)


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
    is_bool = each.type in (bool, bool | None) and not each.words
    return is_bool and "/" not in each.flag


def _built(
    kind: Any, name: str, given: Mapping[str, object], of_command: Mapping[object, object]
) -> Any:
    own = {each.name: each for each in described(kind)}
    values: dict[str, object] = {}
    for each in fields(kind):
        config = _config_of(each.type)
        if config is not None:
            chosen = _chosen(taken_by(name, config), given)
            values[each.name] = _checked(config, chosen, get_args(each.type)[0])
        elif is_dataclass(each.type):
            values[each.name] = _built(each.type, name, given, of_command)
        elif each.name in own:
            values[each.name] = _value(own[each.name], given[each.name])
        else:
            is_own = each.type in of_command
            values[each.name] = of_command[each.type] if is_own else given[each.name]
    built = kind(**values)
    check_described(built)
    return built


def _chosen(options: Sequence[Described], given: Mapping[str, object]) -> dict[str, object]:
    """Collect the values of a config's fields, without those that were left out."""
    values = {each.name: _value(each, given[parameter_name(each)]) for each in options}
    return {name: value for name, value in values.items() if value is not None}


def _value(each: Described, given: object) -> object:
    if each.words:
        check_choice(each.flag, str(given), tuple(each.words))
        return each.words[str(given)]
    if each.type == tuple[str, ...]:
        return tuple(cast(list[str], given or ())) or None
    turned = not each.default if each.gives is None else each.gives
    return given if not _is_switch(each) else turned if given else each.default


def _checked(config: object, chosen: dict[str, object], wanted: object) -> object:
    """Refuse bad values before anything large is imported; return what the field holds."""
    if config is EngineConfig:
        from_mapping(EngineConfig, chosen)
    if config is ServerOptions:
        from_mapping(ServerOptions, {"model_names": (), **chosen})
    return speculation_of(chosen) if wanted == SpeculativeConfig | None else chosen
