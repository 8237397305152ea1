"""The arguments of a fleet's engines: checked where they are given, then sent to workers."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from specdec.arguments import from_mapping, refuse_unknown
from specdec.config import EngineConfig
from specdec.from_vllm import ENGINE
from specdec.options import EngineOptions
from specdec.requests.chat_format import ChatFormat
from specdec.serve.async_llm import AsyncLLM
from specdec.serve.http.app import Application
from specdec.serve.http.options import ServerOptions, is_api_key
from specdec.speculative_config import SpeculativeConfig

# Ray decides how long a replica may finish its requests
SERVER_OPTIONS = {field.name for field in fields(ServerOptions)} - {"shutdown_timeout"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """model, speculative_config, engine: arguments of AsyncLLM. server: fields of ServerOptions.

    ValueError for what cannot be; whether the files are there is seen where the engine starts.
    """

    model: str
    speculative_config: SpeculativeConfig | Mapping[str, object] | None
    engine: EngineOptions
    server: Mapping[str, object]

    def __post_init__(self) -> None:
        refuse_unknown("the engine", self.engine, EngineConfig.__dataclass_fields__, ENGINE)
        EngineConfig(**self.engine)
        SpeculativeConfig.of(self.speculative_config)
        refuse_unknown("server", self.server, SERVER_OPTIONS)
        key = self.server.get("api_key")
        if key is not None and not is_api_key(key):
            raise ValueError("server: api_key: give a key of ASCII characters, or None")
        ChatFormat(chat_template=self.server.get("chat_template"))  # type: ignore[arg-type]
        self._server_options()

    @property
    def num_gpus(self) -> int:
        """Count an engine's GPUs. "auto" means a GPU here, since nodes of a cluster differ."""
        return 0 if str(self.engine.get("device", "auto")) == "cpu" else 1

    @property
    def max_num_seqs(self) -> int:
        """Count the samples that an engine runs together."""
        return EngineConfig(**self.engine).max_num_seqs

    def start(self) -> tuple[AsyncLLM, Application]:
        """Load an engine, with the server's application over it."""
        llm = AsyncLLM(self.model, self.speculative_config, **self.engine)
        return llm, Application(llm, self._server_options())

    def _server_options(self) -> ServerOptions:
        options = {"host": "localhost", "model_names": (self.model,), **self.server}
        if options.get("record") is not None:
            options["record"] = Path(str(options["record"]))
        return from_mapping(ServerOptions, options)
