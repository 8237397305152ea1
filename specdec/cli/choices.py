"""What a user chooses for each command; the docstring is its help.

A field is an option of its name; a field marked with a config stands for the options of it that the
command takes. `command` is the whole command line, `wording` its words for errors.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from specdec.bench.options import MANY
from specdec.cli.errors import Wording
from specdec.config import EngineConfig
from specdec.described import about, option
from specdec.options import EngineOptions
from specdec.serve.http.options import ServerOptions
from specdec.speculative_config import MOST_DRAFTS, SpeculativeConfig

Speculation = Annotated[SpeculativeConfig | None, SpeculativeConfig]
Engine = Annotated[EngineOptions, EngineConfig]
Server = Annotated[dict[str, object], ServerOptions]
TARGET = about('directory, hub id, or a bundled pair: "demo" or "demo-experts"', argument="TARGET")
DRAFT = about('draft: directory, hub id, "demo" or "demo-dspark"', argument="DRAFT")
JSON = "one JSON object on stdout and nothing else"
DEVICE = "auto, cpu, cuda or cuda:N"
WIDE_SHAPES = ("llama-8b", "llama-14b", "llama-1b", "tiny")
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
class ChatSampling(Sampling):
    """Lets answers be longer."""

    max_tokens: int = option(1024, "most tokens to generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Continue a prompt. The text goes to stdout as it is written, statistics to stderr."""

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
class ChatOptions:
    """Talk to a target. It needs a chat template.

    /reset starts over, Ctrl-C ends an answer, Ctrl-D or /exit the program. If standard input is no
    terminal, all of it is one message, and its answer is printed.
    """

    target: str = field(metadata=TARGET)
    speculation: Speculation
    system: str | None = option(None, "the conversation's first message, with the role system")
    chat_template: str | None = option(None, "a file of Jinja text", **TEMPLATE)
    sampling: ChatSampling
    engine: Engine
    wording: Wording


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """Say what a checkpoint is. Every field has its source; no weight is loaded."""

    checkpoint: str = field(
        metadata=about(
            'directory, hub id, "demo", "demo/eagle3", "demo/eagle1" or "demo-dspark"',
            argument="CHECKPOINT",
        )
    )
    target: str | None = option(None, "the target that a draft is meant for: checks more")
    json: bool = option(False, JSON)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Say whether a draft works. The target's own text is forced through it, token by token."""

    target: str = field(metadata=TARGET)
    draft: str = field(metadata=DRAFT)
    num_speculative_tokens: int = option(
        5, "positions to check", short="-k", bounds=(1, MOST_DRAFTS)
    )
    max_tokens: int = option(64, "tokens of text per prompt, at least 16", bounds=(16, MANY))
    draft_options: Annotated[dict[str, object], SpeculativeConfig]
    engine: Engine
    json: bool = option(False, JSON)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Answer requests over HTTP.

    The API is OpenAI's: chat, completions, streams, metrics. Only this machine can connect unless
    --host says otherwise. SIGTERM or Ctrl-C ends it in order.
    """

    target: str = field(metadata=TARGET)
    speculation: Speculation
    port: int = option(8000, "0 to 65535; 0: a free one", bounds=(0, 65535))
    server: Server
    log_format: str = option("text", "text or json", choices=("text", "json"))
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Answer the lines of a batch file.

    The format is OpenAI's. Each line of IN has custom_id, method, url and body. OUT gets a line for
    each, in the same order, with an error where a line cannot be answered. The same command goes on
    with a run that was stopped.
    """

    input: Path = field(metadata=about("a file of JSON lines", argument="IN", exists=True))
    output: Path = field(metadata=about("the lines that answer them", argument="OUT"))
    target: str = field(metadata=TARGET)
    speculation: Speculation
    server: Server
    engine: Engine
    ray: str | None = option(
        None, "answer on a cluster of Ray; auto: the running one", metavar="ADDRESS"
    )
    num_engines: int | None = option(
        None, "on the cluster", unset="one for each GPU, 1 on CPUs", bounds=(1, MANY)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Load a checkpoint and time it. What every field was bound to is printed too."""

    target: str = field(metadata=TARGET)
    draft: str | None = field(default=None, metadata=DRAFT)
    dtype: str = option(
        "auto", "auto, float32, bfloat16 or float16; auto is as the target is stored"
    )
    device: str = option("cpu", DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Write safetensors from .bin files. No pickled code is run."""

    directory: Path = field(
        metadata=about(
            "a checkpoint of .bin files, which stay as they are",
            argument="DIRECTORY",
            exists=True,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WidenOptions:
    """Write a small pair at a large size.

    It has the same text and drafts, at the full cost. DIRECTORY gets target/, eagle3/ and
    prompts.json, for `specdec bench DIRECTORY/target`; and eagle1/, where the source has one.
    """

    directory: Path = field(metadata=about("where to write the pair", argument="DIRECTORY"))
    source: str = option("demo", "demo, or a directory with target/, eagle3/ and prompts.json")
    shape: str = option(
        "llama-8b",
        "llama-8b (18 GB in bfloat16), llama-14b (32 GB), llama-1b (3 GB) or tiny",
        choices=WIDE_SHAPES,
    )
    dtype: str = option("bfloat16", "bfloat16 or float32", choices=("bfloat16", "float32"))
    device: str = option("auto", DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Measure the products of a model on this GPU.

    The fastest tiles for them and for those of a draft go to tiles.json in the cache directory
    ($SPECDEC_CACHE_DIR), which every process started later reads. Tokens stay the same. An
    interrupt keeps what was measured.
    """

    target: str = field(metadata=TARGET)
    draft: str | None = option(
        None, 'draft: directory, hub id, "demo" or "demo-dspark"', unset="no draft"
    )
    dtype: str = option("auto", "auto, bfloat16 or float16; auto is as the target is stored")
    again: bool = option(False, "also measure products that a table already has")
    json: bool = option(False, JSON)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """Print what a bug report needs. Versions, GPU, driver, system: paste them into it."""

    json: bool = option(False, JSON)
