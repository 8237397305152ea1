"""The options that commands share, and how what was given reaches the code that runs a command.

An option's Python name is the field that it sets, so that nothing is passed on by hand.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, TypeVar

from typer import Argument, CallbackParam, Context, Option

from specdec.cli.user_files import MOST_TEXT, read_text
from specdec.cli.wording import Wording
from specdec.sizes import TreeShape

Options = TypeVar("Options")
Number = TypeVar("Number", int, float)
STANDARD_INPUT = "-"  # as a prompt or a file
AUTO = "auto"  # as a number of drafts; config.py has it too, and more to import


def integers(*bounds: int) -> Callable[[CallbackParam, str | None], list[int] | None]:
    """The callback that reads "0,3,5". bounds: the least and the greatest number, if any."""
    return _numbers(int, "integers", bounds)


def floats(*bounds: float) -> Callable[[CallbackParam, str | None], list[float] | None]:
    """The same for "0,0.7"."""
    return _numbers(float, "numbers", bounds)


def _numbers(
    read_one: Callable[[str], Number], kind: str, bounds: tuple[Number, ...]
) -> Callable[[CallbackParam, str | None], list[Number] | None]:
    def read(option: CallbackParam, text: str | None) -> list[Number] | None:
        if text is None:
            return None
        given = f"{option.opts[0]} {text}"
        try:
            values = [read_one(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(f"{given}: give {kind} with commas between them") from None
        if bounds and not all(bounds[0] <= value <= bounds[1] for value in values):
            raise ValueError(f"{given}: give numbers of at least {bounds[0]}, at most {bounds[1]}")
        return values

    return read


def trees(option: CallbackParam, text: str | None) -> list[TreeShape] | None:
    """The callback that reads "8x6x4,16x6x4": rows, levels and top_k of draft trees."""
    if text is None:
        return None
    return [tree(option.opts[0], part, "8x6x4,16x6x4") for part in text.split(",")]


def tree(name: str, text: str, example: str = "16x6x4") -> TreeShape:
    """What reads one of them. name: of the option; it and the example are for errors."""
    try:
        num_rows, num_levels, top_k = map(int, text.split("x"))
    except ValueError:
        raise ValueError(f"{name} {text}: give rows x levels x top_k, as in {example}") from None
    shape = TreeShape(num_levels=num_levels, top_k=top_k, num_nodes=num_rows - 1)
    if min(num_levels, top_k - 1) < 1 or not 1 <= shape.num_nodes <= shape.num_candidates:
        raise ValueError(
            f"{name} {text}: a tree has 1 level or more, a top_k of 2 or more, and from 2 rows to "
            "as many as the root and all its candidates"
        )
    return shape


def num_drafts(option: CallbackParam, text: str | None) -> int | str | None:
    """The callback that reads a number of drafts, or "auto"."""
    if text is None or text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option.opts[0]} {text}: give an integer, or auto") from None


def text_of(option: CallbackParam, file: Path | str | None) -> str | None:
    """The callback that reads the file; `-` is standard input."""
    if file is None:
        return None
    if str(file) == STANDARD_INPUT:
        return read_input(option.opts[0].removeprefix("--"))
    try:
        return read_text(Path(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"{option.opts[0]} {file}: no text in UTF-8: {error}") from error
    except OSError as error:
        raise ValueError(f"{option.opts[0]} {file}: {error.strerror}; give a text file") from error
    except ValueError as error:
        wanted = f"give a text file, or {STANDARD_INPUT} for standard input"
        raise ValueError(f"{option.opts[0]} {error}; {wanted}") from error


def read_input(what: str) -> str:
    """The text on standard input without its last line break; ValueError if there is none."""
    try:
        text = "" if sys.stdin is None else sys.stdin.read(MOST_TEXT + 1)  # None: it is closed
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: no text in UTF-8: {error}") from error
    if len(text) > MOST_TEXT:
        raise ValueError(f"standard input: more than {MOST_TEXT} characters for the {what}")
    text = text.removesuffix("\n")
    if not text:
        raise ValueError(f"no {what}: standard input is empty")
    return text


def check_choice(name: str, given: str, allowed: tuple[str, ...]) -> None:
    """ValueError if an option has another value."""
    if given not in allowed:
        raise ValueError(f"{name} {given}: allowed are {', '.join(allowed)}")


Target = Annotated[
    str,
    Argument(
        metavar="TARGET",
        help='directory, hub id, or "demo", the bundled pair',
        show_default=False,
    ),
]
Draft = Annotated[
    str | None,
    Option(help='EAGLE draft: directory, hub id or "demo"', show_default="no draft"),
]
NumSpeculativeTokens = Annotated[
    str | None,
    Option(
        "--num-speculative-tokens",
        "-k",
        metavar="INTEGER|auto",
        callback=num_drafts,
        show_default="auto",
        help="most drafts per round, at most 32; auto: 8, or 3 on a CPU",
    ),
]
FixedDrafts = Annotated[
    bool,
    Option("--fixed-drafts", help="that many drafts in every round, not as many as pay"),
]
DraftTopK = Annotated[
    int | None,
    Option(
        show_default="with -k auto as it pays, else 1",
        help="1: chains; above 1: a tree of -k levels, in which as many nodes get as many children",
    ),
]
NumDraftTokens = Annotated[
    int | None,
    Option(help="nodes of the tree to verify in a round", show_default="-k"),
]
DraftConfidenceThreshold = Annotated[
    float | None,
    Option(
        metavar="PROBABILITY",
        show_default="as it pays, or 0",
        help="draft on only while the best paths are on average at least this probable; 0: always",
    ),
]
MaxTokens = Annotated[int, Option(help="most tokens to generate")]
Temperature = Annotated[float, Option(help="0 is greedy")]
TopP = Annotated[
    float | None, Option(help="keep the best tokens up to this mass", show_default="1.0")
]
TopK = Annotated[int | None, Option(help="keep this many tokens, 0 = all", show_default="0")]
MinP = Annotated[
    float | None,
    Option(
        help="keep tokens of at least this share of the best one's probability", show_default="0.0"
    ),
]
Seed = Annotated[
    int | None, Option(help="seed of the noise; -1 draws one", show_default="drawn and reported")
]
EngineSeed = Annotated[
    int | None, Option(help="draws the seeds of requests", show_default="random")
]
RepetitionPenalty = Annotated[float, Option(help="divides logits of tokens in prompt and output")]
Acceptance = Annotated[
    str, Option(help="exact, rejection or block: how sampled drafts are accepted")
]
Stop = Annotated[list[str] | None, Option(help="a string that ends the text; may be repeated")]
Dtype = Annotated[
    str, Option(help="auto, float32, bfloat16 or float16; auto is float32 on the CPU")
]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:N")]
MaxModelLen = Annotated[int | None, Option(help="longest context", show_default="the target's")]
MaxNumSeqs = Annotated[
    int | None,
    Option(help="most requests at a time", show_default="what the command needs"),
]
GpuMemoryUtilization = Annotated[
    float | None, Option(help="share of a GPU's memory to use", show_default="0.9")
]
NoPrefixCaching = Annotated[
    bool,
    Option(
        "--no-prefix-caching",
        callback=lambda value: not value,
        help="compute every prompt anew, even where another began the same way",
    ),
]
EnforceEager = Annotated[bool, Option("--enforce-eager", help="capture no CUDA graphs")]
GraphSizes = Annotated[
    str | None, Option(help="request counts to capture rounds for: 1,2,4", callback=integers())
]
GraphTokenSizes = Annotated[
    str | None,
    Option(help="row counts to capture steps with prompts for: 256,1024", callback=integers()),
]
ServedModelNames = Annotated[
    list[str] | None,
    Option(
        "--served-model-name",
        help="what requests call the model; may be repeated",
        show_default="TARGET",
    ),
]
ChatTemplate = Annotated[
    Path | None,
    Option(callback=text_of, help="a file of Jinja text", show_default="the tokenizer's own"),
]
GenerationConfig = Annotated[str, Option(help="auto: sampling defaults of the checkpoint; none")]
IgnoreUnknown = Annotated[
    bool, Option("--ignore-unknown", help="ignore unknown fields of requests")
]
ServerMaxNumSeqs = Annotated[int | None, Option(help="most samples at a time", show_default="64")]
MaxNumBatchedTokens = Annotated[
    int | None, Option(help="tokens of prompts in a step", show_default="8192")
]
MaxPromptSlowdown = Annotated[
    float | None,
    Option(help="how many times as long prompts may make a step", show_default="1.8"),
]
NumKvBlocks = Annotated[int | None, Option(help="size of the cache in blocks of 64 tokens")]
Json = Annotated[bool, Option("--json", help="one JSON object on stdout and nothing else")]

# the options that are arguments of LLM
ENGINE = {"dtype", "device", "max_model_len", "enable_prefix_caching", "enforce_eager"}
ENGINE |= {"cuda_graph_sizes", "cuda_graph_token_sizes"}
ENGINE |= {"max_num_seqs", "gpu_memory_utilization"}
ENGINE |= {"max_num_batched_tokens", "max_prompt_slowdown", "num_kv_blocks"}


def options_of(kind: type[Options], given: Mapping[str, object]) -> Options:
    """Sort what was given: fields of `kind`, arguments of the engine, the rest for sampling.

    engine: without None, so that a command may have its own defaults.
    """
    names = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    engine = {name: given[name] for name in given if name in ENGINE and given[name] is not None}
    sampling = {name: given[name] for name in given if name not in names and name not in ENGINE}
    values = {**given, "engine": engine, "sampling": sampling}
    return kind(**{name: _typed(values[name], names[name]) for name in names if name in values})


def wording_of(context: Context) -> Wording:
    """For errors of the command that was called."""
    return Wording.of(context.command.params, context.params["max_model_len"] is not None)


def _typed(value: object, kind: object) -> object:
    """A path as one: some versions of Typer leave a context's paths as text."""
    return Path(value) if isinstance(value, str) and kind in (Path, Path | None) else value
