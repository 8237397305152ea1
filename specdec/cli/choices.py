"""What a user chooses for each command that runs engines.

A field is an option of its name; a field marked with a config stands for the options of it that the
command takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specdec.cli.command import CommandLine
from specdec.cli.wording import Wording
from specdec.config import MAX_MODEL_LEN, MOST_SEQS, EngineConfig
from specdec.described import about, described, option
from specdec.options import EngineOptions
from specdec.serve.http.options import MOST_SECONDS, ServerOptions
from specdec.sizes import TreeShape
from specdec.speculative_config import MOST_DRAFTS, SpeculativeConfig

Speculation = Annotated[SpeculativeConfig | None, SpeculativeConfig]
Engine = Annotated[EngineOptions, EngineConfig]
Server = Annotated[dict[str, object], ServerOptions]
TARGET = about('directory, hub id, or "demo", the bundled pair', argument="TARGET")
DRAFT = about('EAGLE draft: directory, hub id or "demo"', argument="DRAFT")
JSON = "one JSON object on stdout and nothing else"
MANY = 1 << 20
SUITES = (
    "protocol, rounds, exactness, context, products, loop, noise, trees, requests, first_token, "
    "cold; with commas; or all"
)
ABOUT = {each.name: each.help for each in described(EngineConfig)}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchChoices:
    """Says what is measured. None stands for what each suite has of its own."""

    target: str = field(default="demo", metadata=TARGET)
    draft: str | None = option(None, "EAGLE draft", unset='"demo" for "demo", else none')
    suite: str = option("protocol", SUITES)
    ks: Sequence[int] | None = option(
        None,
        "values of K; 0, plain decoding, is always one",
        unset="0,3,5",
        bounds=(0, MOST_DRAFTS),
        flag="--num-speculative-tokens",
        short="-k",
    )
    batches: Sequence[int] | None = option(
        None,
        "requests at a time",
        unset="1,8,32 on a GPU, 1 on a CPU",
        bounds=(1, MOST_SEQS),
        flag="--batch",
    )
    contexts: Sequence[int] | None = option(
        None,
        "prompt lengths of the suites context and exactness",
        unset="six, from 256 to 32768",
        bounds=(1, MAX_MODEL_LEN),
    )
    trees: Sequence[TreeShape] | None = option(
        None,
        "of the suites trees and context: rows x levels x top_k, as in 8x6x4,16x6x4",
        unset="eight, of the suite trees",
    )
    temperatures: Sequence[float] | None = option(
        None,
        "of the suites loop, noise and trees",
        unset="0,0.8, and 0,0.7,1 of trees",
        bounds=(0.0, 100.0),
    )
    thresholds: Sequence[float] | None = option(
        None,
        "of the suite trees: below which drafts stop, -1: never",
        unset="five greedy, else 0.2",
        bounds=(-1.0, 1.0),
    )
    num_prompts: int = option(8, "prompts at the small batches", bounds=(1, 4096))
    prompts: Annotated[
        Path | None,
        Option(exists=True, help="JSON file", show_default="prompts.json beside the target"),
    ] = None
    max_tokens: int = option(160, "tokens of each answer", bounds=(2, MAX_MODEL_LEN))
    repeats: int = option(
        2,
        "whole runs, the best of which counts; the suite loop has a row for each",
        bounds=(1, MANY),
    )
    num_rounds: int = option(30, "rounds timed by the device's clock", bounds=(1, MANY))
    rounds_of_memory: int | None = option(
        None, "rounds after which the suite cold reads memory", unset="1000", bounds=(1, MANY)
    )
    max_seconds: float | None = option(
        None, "begin nothing more after this many seconds", bounds=(0, MOST_SECONDS)
    )
    seed: int | None = option(None, ABOUT["seed"], unset="random")
    dtype: str = option("auto", ABOUT["dtype"])
    device: str = option("auto", ABOUT["device"])
    max_model_len: int | None = option(
        None,
        "longest context, where a suite does not set it",
        unset="4096",
        bounds=(2, MAX_MODEL_LEN),
    )
    max_num_seqs: int | None = option(
        None, "request rows of each engine", unset="the largest batch", bounds=(1, MOST_SEQS)
    )
    gpu_memory_utilization: float | None = option(
        None,
        "share of a GPU's memory to use in the suite cold; the others take what they need",
        unset="0.9",
    )
    enforce_eager: bool = option(False, ABOUT["enforce_eager"])
    adaptive: bool | None = option(None, "loads with as many drafts as pay, too; on a GPU")
    chains: bool | None = option(None, "with --adaptive: chains alone, no draft trees")
    ramp: bool | None = option(
        None, "in the suite loop: a load that rises and falls, in place of others"
    )
    json: Annotated[Path | None, Option(help="write the last line's JSON to a file too")] = None
    charts: Path | None = field(
        default=None, metadata=about("directory for PNG charts (needs matplotlib)")
    )
    command: CommandLine
    wording: Wording

    @property
    def eagle(self) -> str | None:
        """Name the draft: of the bundled pair its own, unless another is given."""
        return self.draft or ("demo" if self.target == "demo" else None)

    @property
    def suites(self) -> tuple[str, ...]:
        """Split the names of the suites."""
        return tuple(self.suite.split(","))
