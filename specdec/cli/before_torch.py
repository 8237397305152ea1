"""Refuse what can be known to be wrong before a command imports torch.

That is a package or a path that is missing, and a value that no engine, server or file takes. A
command without a function `check_...` checks what it is given itself, without torch.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from specdec.arguments import from_mapping
from specdec.cli import choices
from specdec.cli.bench_choices import BenchChoices, BenchServeChoices, refuse_unread
from specdec.cli.readers import check_choice
from specdec.config import EngineConfig
from specdec.options import EngineOptions
from specdec.requests.chat_format import ChatFormat
from specdec.requests.chat_template import check_template
from specdec.serve.http.agents.answer_reading import REASONING_PARSERS, TOOL_CALL_PARSERS
from specdec.serve.http.options import ServerOptions, is_api_key
from specdec.speculative_config import SpeculativeConfig
from specdec.start.locate import local_directory, locate
from weights.demo import demo_directory


def check_models(
    target: str, draft: SpeculativeConfig | str | None = None, engine: EngineOptions | None = None
) -> None:
    """Refuse paths that are not there, and values that no engine takes."""
    EngineConfig(**(engine or {}))
    local_directory(target, "target")
    if draft is not None:
        local_directory(draft if isinstance(draft, str) else draft.model, "draft")


def server_options(options: choices.ServeOptions | choices.BatchOptions) -> ServerOptions:
    """Build the server's config, and check its chat template."""
    server = from_mapping(ServerOptions, {"model_names": (options.target,), **options.server})
    ChatFormat(chat_template=server.chat_template)
    check_template(server.chat_template)
    return server


def source_directory(source: str) -> Path:
    """Find the pair that is to be widened; ValueError if there is none."""
    directory = demo_directory("target").parent if source == "demo" else Path(source)
    for part in ("target", "eagle3"):
        if not (directory / part / "config.json").is_file():
            raise ValueError(
                f"--source {source}: no {part}/config.json in it; give demo, or a directory with "
                "target/, eagle3/ and prompts.json"
            )
    return directory


def check_inspect(options: choices.InspectOptions) -> None:
    if options.target is not None:
        check_models(options.target)
    locate(options.checkpoint, "checkpoint")


def check_serve(options: choices.ServeOptions) -> None:
    _require("serve", "server", ("starlette", "uvicorn", "httptools", "prometheus_client"))
    server = server_options(options)
    # typer takes an empty variable for none, which would open a server that was meant to be locked
    key = os.environ.get("SPECDEC_API_KEY") if server.api_key is None else server.api_key
    if key is not None and not is_api_key(key):
        raise ValueError("--api-key: give a key of ASCII characters, or leave it out")
    check_choice("--tool-call-parser", server.tool_call_parser, TOOL_CALL_PARSERS)
    check_choice("--reasoning-parser", server.reasoning_parser, REASONING_PARSERS)
    check_models(options.target, options.speculation, options.engine)


def check_batch(options: choices.BatchOptions) -> None:
    _require("batch", "server", ("starlette", "uvicorn", "prometheus_client"))
    if options.ray is not None:
        _require("batch --ray", "ray", ("ray", "pyarrow", "pandas"))
    server_options(options)
    if options.num_engines is not None and options.ray is None:
        raise ValueError(f"--num-engines {options.num_engines} without a cluster: give --ray too")
    check_models(options.target, options.speculation, options.engine)


def check_bench(options: BenchChoices) -> None:
    refuse_unread(options)
    _check_outputs(options.json, options.charts)
    check_models(options.target, options.eagle, {"dtype": options.dtype, "device": options.device})


def check_bench_serve(options: BenchServeChoices) -> None:
    _require("bench serve", "bench", ["httpx2"])
    _check_outputs(options.json, options.charts)


def check_widen(options: choices.WidenOptions) -> None:
    source_directory(options.source)


def check_load(options: choices.LoadOptions | choices.TuneOptions) -> None:
    device = options.device if isinstance(options, choices.LoadOptions) else "auto"
    check_models(options.target, options.draft, {"dtype": options.dtype, "device": device})


check_tune = check_load


def _require(what: str, extra: str, modules: Sequence[str], verb: str = "needs") -> None:
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        install = f'pip install "specdec[{extra}]"'
        raise ValueError(f"{what} {verb} {', '.join(missing)}: {install}")


def _check_outputs(json: Path | None, charts: Path | None) -> None:
    if json is not None and not json.parent.is_dir():
        raise ValueError(f"--json {json}: there is no directory {json.parent}")
    if json is not None and json.is_dir():
        raise ValueError(f"--json {json}: a directory; give a file")
    if charts is not None:
        _require(f"--charts {charts}: charts", "bench", ["matplotlib"], verb="need")
