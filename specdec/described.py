"""What each option says about itself: its meaning, its values, its name on the command line.

A config is a dataclass whose fields are made by `option`. Its checks, the signatures of LLM and
AsyncLLM, the options of every command and docs/options.md are read from these descriptions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar

from specdec.arguments import check_choice, check_int, plain

Value = TypeVar("Value")
KEY = "option"  # of a field's metadata
# the commands that take an option
TEXT = ("generate", "chat")
SERVERS = ("serve", "batch")
DRAFTING = (*TEXT, *SERVERS)
ENGINES = (*TEXT, "verify", *SERVERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Describes a field of a config. default: MISSING if a value must be given.

    help: its meaning in a few words. text: the whole of it for the documentation, if help is only
    a part of it or describes a switch that turns the option off.
    unset: what holds if no value is given, where the default itself does not say it.
    bounds: the least and the greatest number. choices: the values that are allowed.
    only: the values that describe specdec, the first one being the default; help says why.
    commands: those that take it, if they are not the COMMANDS of its config; python_only: why none
    does. planned_by: commands that choose a value of their own.
    flag: its option on the command line, if not its own name; short: one letter more. argument: the
    name in --help of what has no flag. gives: the value of a switch. words: the value that each
    word stands for. metavar: as --help shows a value; of FILE the text is read. envvar: the
    variable that may hold it. exists: whether a path must be there.
    """

    name: str = ""
    type: object = None
    default: object = None
    help: str
    text: str = ""
    unset: str = ""
    bounds: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()
    only: tuple[object, ...] = ()
    commands: tuple[str, ...] = ()
    python_only: str = ""
    planned_by: tuple[str, ...] = ()
    flag: str = ""
    short: str = ""
    argument: str = ""
    gives: bool | None = None
    words: Mapping[str, object] = field(default_factory=dict)
    metavar: str | None = None
    envvar: str | None = None
    exists: bool = False


def about(help: str, **more: Any) -> dict[str, Described]:
    """Make the metadata of a field. more: other fields of Described."""
    return {KEY: Described(help=help, **more)}


def option(default: Value, help: str, **more: Any) -> Value:
    return field(default=default, metadata=about(help, **more))


def fixed(default: Value, why: str, *others: object) -> Value:
    """Declare an option of vLLM that has one value here, perhaps under other names too."""
    return option(default, why, only=(default, *others), python_only="it has one value")


def described(config: object) -> Iterator[Described]:
    """Yield the described fields of a config or of its class, in their order."""
    for each in fields(config):  # type: ignore[arg-type]
        if KEY in each.metadata:
            own: Described = each.metadata[KEY]
            flag = own.flag or f"--{each.name.replace('_', '-')}"
            usual = () if own.python_only else getattr(config, "COMMANDS", ())
            own = replace(own, flag=flag, commands=own.commands or usual)
            yield replace(own, name=each.name, type=each.type, default=each.default)


def check_described(config: object) -> None:
    """Make numbers of numpy Python's own; ValueError for a value that its field cannot have."""
    for each in described(config):
        value = plain(getattr(config, each.name))
        object.__setattr__(config, each.name, value)
        if value is not None or each.only or each.default not in (None, MISSING):
            _check(each, value)


def _check(each: Described, value: object) -> None:
    if each.only:
        # with its type, since 1 == True, and since an array compares item by item
        if not any(value is x or (type(value) is type(x) and value == x) for x in each.only):
            only = " or ".join(map(repr, each.only))
            verb = "is" if len(each.only) == 1 else "are"
            why = f"only {only} {verb} possible, since {each.help}"
            raise ValueError(f"{each.name}={value!r}: {why}")
    elif each.choices:
        check_choice(each.name, value, each.choices)
    elif each.type in (bool, bool | None):
        check_choice(each.name, value, (False, True) if each.type is bool else (None, False, True))
    elif each.bounds is not None and each.type in (int, int | None):
        check_int(each.name, value, *map(int, each.bounds))
    elif each.bounds is not None and each.type in (float, float | None):
        low, high = each.bounds
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # type: ignore[operator]
            raise ValueError(f"{each.name}={value!r}: give a number from {low} to {high}")
