"""What do types and documentation say about the options? Write it from the configs' descriptions.

    python -m scripts.write_options    prints the files that changed

Generated are EngineOptions in specdec/options.py, which type checkers and editors read, and
docs/options.md. A test fails while either is out of date.
"""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from specdec.config import EngineConfig
from specdec.described import ENGINES, Described, described
from specdec.serve.http.options import ServerOptions
from specdec.speculative_config import SpeculativeConfig

ROOT = Path(__file__).parent.parent
BEGIN, END = "    # generated: python -m scripts.write_options\n", "    # end of generated\n"
HEAD = "| option | on the command line | default | meaning |\n|---|---|---|---|\n"
PAGE = """# Options

Written by `python -m scripts.write_options` from the descriptions in specdec/config.py,
specdec/speculative_config.py and specdec/serve/http/options.py; change them there. The commands
that run an engine are {commands}.
All of them take an option unless its row names those that do; `specdec COMMAND --help` lists all
that a command takes.

## The draft

Arguments of `SpeculativeConfig`, or keys of a dict, as `speculative_config`. None, the default, is
plain decoding.

{draft}
## The engine

Keyword arguments of `LLM`, `AsyncLLM` and `AsyncEngineArgs` in Python, of
`specdec.fleet.EngineStage`, and keys of `specdec.fleet.build_app`.

{engine}
## From vLLM

These are taken so that a script for vLLM runs. Any other value is refused with the reason.

{fixed}
## The server

Options of `specdec serve`, some of `specdec batch` too. The names in the first column are the keys
of `server` in `specdec.fleet.build_app`, except shutdown_timeout, which Ray decides, and those that
matter without clients in `specdec.fleet.EngineStage`.

{server}"""


def generated() -> dict[Path, str]:
    """The files with what is generated in them."""
    types = ROOT / "specdec" / "options.py"
    return {types: _with_types(types.read_text()), ROOT / "docs" / "options.md": page()}


def page() -> str:
    """The documentation of all options."""
    engine = list(described(EngineConfig))
    draft = list(described(SpeculativeConfig))
    fixed = [each for each in [*engine, *draft] if each.only]
    return PAGE.format(
        commands=_listed(ENGINES),
        draft=_table(each for each in draft if not each.only),
        engine=_table(each for each in engine if not each.only),
        fixed="| option | value | since |\n|---|---|---|\n" + "".join(map(_fixed_row, fixed)),
        server=_table(described(ServerOptions), ("serve",)),
    )


def _with_types(text: str) -> str:
    """The module with one line a field between the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, "the marks of what is generated are gone"
    lines = [f"    {each.name}: {_type_text(each.type)}\n" for each in fields(EngineConfig)]
    return "".join([before, begin, *lines, end, after])


def _type_text(kind: object) -> str:
    text = kind.__name__ if isinstance(kind, type) and str(kind)[0] == "<" else str(kind)
    return text.replace("collections.abc.", "").replace("pathlib.", "")


def _table(options: Iterable[Described], usual: tuple[str, ...] = ENGINES) -> str:
    return HEAD + "".join(_row(each, usual) for each in options)


def _row(each: Described, usual: tuple[str, ...]) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (each.short, *each.flag.split("/")) if flag)
    where = "" if each.commands == usual else f": {_listed(each.commands)}"
    line = f"none: {each.python_only}" if each.python_only else f"{flags}{where}"
    default = [] if each.default is MISSING else [f"`{each.default!r}`"]
    cells = [f"`{each.name}`", line, ": ".join([*default, *filter(None, [each.unset])])]
    return f"| {' | '.join([*cells, each.text or each.help])} |\n"


def _fixed_row(each: Described) -> str:
    values = ", ".join(f"`{value!r}`" for value in each.only)
    return f"| `{each.name}` | {values} | {each.help} |\n"


def _listed(commands: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in commands)


def main() -> None:
    for file, text in generated().items():
        if file.read_text() != text:
            file.write_text(text)
            print(file.relative_to(ROOT))


if __name__ == "__main__":
    main()
