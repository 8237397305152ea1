"""What a user chooses for each command that runs an engine.

A field is an option of its name; a field marked with a config stands for the options of it that the
command takes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Argument

from specdec.cli.wording import Wording
from specdec.config import EngineConfig
from specdec.described import about, option
from specdec.options import EngineOptions
from specdec.serve.http.options import ServerOptions
from specdec.speculative_config import SpeculativeConfig

Speculation = Annotated[SpeculativeConfig | None, SpeculativeConfig]
Engine = Annotated[EngineOptions, EngineConfig]
Server = Annotated[dict[str, object], ServerOptions]
TARGET = about('directory, hub id, or "demo", the bundled pair', argument="TARGET")
DRAFT = about('EAGLE draft: directory, hub id or "demo"', argument="DRAFT")
JSON = "one JSON object on stdout and nothing else"
TEMPLATE = {"unset": "the tokenizer's own", "metavar": "FILE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Holds arguments of SamplingParams. None stands for its default."""

    max_tokens: int = option(256, "most tokens to generate")
    temperature: float = option(0.0, "0 is greedy")
    top_p: float | None = option(None, "keep the best tokens up to this mass", unset="1.0")
    top_k: int | None = option(None, "keep this many tokens, 0 = all", unset="0")
    min_p: float | None = option(
        None, "keep tokens of at least this share of the best one's probability", unset="0.0"
    )
    seed: int | None = option(None, "seed of the noise; -1 draws one", unset="drawn and reported")
    repetition_penalty: float = option(1.0, "divides logits of tokens in prompt and output")
    stop: tuple[str, ...] = option((), "a string that ends the text; may be repeated")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSampling(Sampling):
    """Adds arguments of SamplingParams that a conversation does not offer."""

    n: int = option(1, "samples; number i has seed + i", short="-n")
    presence_penalty: float = option(0.0, "subtracted from the logits of generated tokens")
    frequency_penalty: float = option(0.0, "subtracted once for each time a token was generated")
    min_tokens: int = option(0, "no end of text before this many tokens")
    logprobs: int | None = option(None, "JSON: this many alternatives beside each token")
    ignore_eos: bool = option(False, "go on after an EOS token")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """A prompt comes from one of `prompt`, the file read into `prompt_text`, standard input."""

    target: str = field(metadata=TARGET)
    prompt: str | None = option(
        None, "- or nothing: standard input, if there is no --prompt-file", argument="PROMPT"
    )
    prompt_text: str | None = option(
        None,
        "a text, - for standard input; its last line break is dropped",
        flag="--prompt-file",
        metavar="FILE",
    )
    speculation: Speculation
    sampling: GenerateSampling
    engine: Engine
    json: bool = option(False, JSON)
    show_drafts: bool = option(False, "colour what was drafted; JSON: rounds")
    wording: Wording


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(Sampling):
    """Lets answers be longer."""

    max_tokens: int = option(1024, "most tokens to generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """A conversation may begin with a message of the system."""

    target: str = field(metadata=TARGET)
    speculation: Speculation
    system: str | None = option(None, "the conversation's first message, with the role system")
    chat_template: str | None = option(None, "a file of Jinja text", **TEMPLATE)
    sampling: ChatSampling
    engine: Engine
    wording: Wording


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """draft_options: arguments of SpeculativeConfig beside the draft and its number of tokens."""

    target: str = field(metadata=TARGET)
    draft: str = field(metadata=DRAFT)
    num_speculative_tokens: int = option(5, "positions to check", short="-k")
    max_tokens: int = option(64, "tokens of text per prompt, at least 16", bounds=(16, 1 << 20))
    draft_options: Annotated[dict[str, object], SpeculativeConfig]
    engine: Engine
    json: bool = option(False, JSON)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """server: arguments of ServerOptions."""

    target: str = field(metadata=TARGET)
    speculation: Speculation
    port: int = option(8000, "0 to 65535; 0: a free one", bounds=(0, 65535))
    server: Server
    log_format: str = option("text", "text or json")
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """server: how bodies of requests are read. ray: a cluster's address."""

    input: Annotated[
        Path, Argument(exists=True, dir_okay=False, metavar="IN", help="a file of JSON lines")
    ]
    output: Annotated[
        Path, Argument(dir_okay=False, metavar="OUT", help="the lines that answer them")
    ]
    target: str = field(metadata=TARGET)
    speculation: Speculation
    server: Server
    engine: Engine
    ray: str | None = option(
        None, "answer on a cluster of Ray; auto: the running one", metavar="ADDRESS"
    )
    num_engines: int | None = option(
        None, "on the cluster", unset="one for each GPU, 1 on CPUs", bounds=(1, 1 << 20)
    )
