"""The command `specdec`: what can be asked, with which options. What a command does is in the file of its name.

A command imports its file when it is called: `specdec --help` should not wait for torch. Text and JSON go to stdout,
everything else to stderr. SPECDEC_LOG sets the log level; SPECDEC_DEBUG=1 shows tracebacks.
"""

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Text from a target model with an EAGLE draft, equal to plain decoding bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Target = Annotated[
    str, typer.Argument(help='directory, hub id, or "demo", the bundled pair', show_default=False)
]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16; auto is float32 on the CPU")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
SUITES = (
    "protocol, rounds, exactness, k, batch, context, products, gaps, requests, waiting, prefill, capture, "
    "padding, memory, cold; with commas; or all"
)
CONTEXTS = "256,1024,4096,8192,16384,32768"
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="capture no CUDA graphs")]
GraphSizes = Annotated[str | None, typer.Option(help="request counts to capture rounds for: 1,2,4")]
GraphTokenSizes = Annotated[
    str | None, typer.Option(help="row counts to capture prompt chunks for: 256,1024")
]
NoPrefixCaching = Annotated[
    bool,
    typer.Option(
        "--no-prefix-caching",
        help="compute every prompt anew, also where another began the same way",
    ),
]
TopP = Annotated[
    float | None, typer.Option(help="keep the best tokens up to this mass", show_default="1.0")
]
TopK = Annotated[int | None, typer.Option(help="keep so many tokens, 0 = all", show_default="0")]
MinP = Annotated[
    float | None,
    typer.Option(
        help="keep tokens of at least so much of the best one's probability", show_default="0.0"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")]


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and leave the process. Exit codes: 0, 1 for a check that failed, 2 for what cannot be done."""
    try:
        _set_up_logging(os.environ.get("SPECDEC_LOG", "warning"))
        given = sys.argv[1:] if args is None else list(args)
        app(args=given, prog_name="specdec", obj=shlex.join(["specdec", *given]))
    except (ValueError, OSError) as error:
        if os.environ.get("SPECDEC_DEBUG", "0") not in ("", "0"):
            raise
        print(f"specdec: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@app.command()
def generate(
    target: Target,
    prompt: Annotated[
        str | None, typer.Argument(help="default: --prompt-file, or standard input")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="a text; its last line break is dropped"),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help='EAGLE draft: directory, hub id or "demo"; none: no drafts')
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            min=0,
            max=32,
            show_default="3",
            help="drafts per round",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Annotated[
        int | None, typer.Option(help="of the noise", show_default="drawn and reported")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="samples; number i has seed + i")] = 1,
    presence_penalty: Annotated[
        float, typer.Option(help="off the logits of generated tokens")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="the same, times their count")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="divides logits of tokens in prompt and output")
    ] = 1.0,
    min_tokens: Annotated[int, typer.Option(help="no end before so many tokens")] = 0,
    logprobs: Annotated[
        int | None, typer.Option(help="JSON: so many alternatives beside each token")
    ] = None,
    acceptance: Annotated[
        str, typer.Option(help="exact, rejection or block: how sampled drafts are accepted")
    ] = "exact",
    stop: Annotated[
        list[str] | None, typer.Option(help="a string that ends the text; may be repeated")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="go on behind an end-of-text token")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="longest context; default: the target's")
    ] = None,
    no_prefix_caching: NoPrefixCaching = False,
    enforce_eager: EnforceEager = False,
    cuda_graph_sizes: GraphSizes = None,
    cuda_graph_token_sizes: GraphTokenSizes = None,
    json: Json = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="colour what was drafted; JSON: rounds")
    ] = False,
) -> None:
    """Continue a prompt: the text on stdout as it is written, a line of statistics on stderr."""
    from specdec.cli.generate import GenerateOptions, run_generate

    run_generate(
        GenerateOptions(
            target=target,
            prompt=prompt,
            prompt_file=prompt_file,
            draft=draft,
            num_speculative_tokens=num_speculative_tokens,
            sampling={
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "min_p": min_p,
                "seed": seed,
                "n": n,
                "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty,
                "repetition_penalty": repetition_penalty,
                "min_tokens": min_tokens,
                "logprobs": logprobs,
                "max_tokens": max_tokens,
                "stop": stop or (),
                "ignore_eos": ignore_eos,
            },
            engine={
                "dtype": dtype,
                "device": device,
                "max_model_len": max_model_len,
                "max_num_seqs": min(n, 64),
                "enable_prefix_caching": not no_prefix_caching,
                "enforce_eager": enforce_eager,
                "cuda_graph_sizes": _sizes("--cuda-graph-sizes", cuda_graph_sizes),
                "cuda_graph_token_sizes": _sizes(
                    "--cuda-graph-token-sizes", cuda_graph_token_sizes
                ),
            },
            acceptance=acceptance,
            json=json,
            show_drafts=show_drafts,
        )
    )


@app.command()
def chat(
    target: Target,
    draft: Annotated[
        str | None, typer.Option(help='EAGLE draft: directory, hub id or "demo"; none: no drafts')
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            min=0,
            max=32,
            show_default="3",
            help="drafts per round",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="what stands before the conversation, with the role system")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Jinja text", show_default="the tokenizer's own"
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Annotated[
        int | None,
        typer.Option(help="of the noise of every answer", show_default="drawn and reported"),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="divides logits of tokens in prompt and output")
    ] = 1.0,
    acceptance: Annotated[
        str, typer.Option(help="exact, rejection or block: how sampled drafts are accepted")
    ] = "exact",
    stop: Annotated[
        list[str] | None, typer.Option(help="a string that ends an answer; may be repeated")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="longest conversation; default: the target's")
    ] = None,
    no_prefix_caching: NoPrefixCaching = False,
    enforce_eager: EnforceEager = False,
    cuda_graph_sizes: GraphSizes = None,
    cuda_graph_token_sizes: GraphTokenSizes = None,
) -> None:
    """Talk to a target that has a chat template: /reset forgets, Ctrl-C ends an answer, Ctrl-D or /exit the program.

    Where standard input is no terminal, all of it is one message, and its answer is printed.
    """
    from specdec.cli.chat import ChatOptions, run_chat

    run_chat(
        ChatOptions(
            target=target,
            draft=draft,
            num_speculative_tokens=num_speculative_tokens,
            acceptance=acceptance,
            system=system,
            chat_template=chat_template,
            sampling={
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "min_p": min_p,
                "seed": seed,
                "repetition_penalty": repetition_penalty,
                "max_tokens": max_tokens,
                "stop": stop or (),
            },
            engine={
                "dtype": dtype,
                "device": device,
                "max_model_len": max_model_len,
                "max_num_seqs": 1,
                "enable_prefix_caching": not no_prefix_caching,
                "enforce_eager": enforce_eager,
                "cuda_graph_sizes": _sizes("--cuda-graph-sizes", cuda_graph_sizes),
                "cuda_graph_token_sizes": _sizes(
                    "--cuda-graph-token-sizes", cuda_graph_token_sizes
                ),
            },
        )
    )


@app.command()
def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help='directory, hub id, "demo", "demo/eagle3" or "demo/eagle1"', show_default=False
        ),
    ],
    target: Annotated[
        str | None, typer.Option(help="the target that a draft is meant for: checks more")
    ] = None,
    json: Json = False,
) -> None:
    """Say what a checkpoint is, every field with its source, without loading it."""
    from specdec.cli.inspect import run_inspect

    run_inspect(checkpoint, target, json)


@app.command()
def verify(
    target: Target,
    draft: Annotated[
        str, typer.Argument(help='EAGLE draft: directory, hub id or "demo"', show_default=False)
    ],
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=0, help="positions to check")
    ] = 5,
    max_tokens: Annotated[int, typer.Option(min=16, help="tokens of text per prompt")] = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
    enforce_eager: EnforceEager = False,
    cuda_graph_sizes: GraphSizes = None,
    cuda_graph_token_sizes: GraphTokenSizes = None,
    json: Json = False,
) -> None:
    """Load both, force the target's own text through the draft, and say whether the draft works."""
    from specdec.cli.verify import VerifyOptions, run_verify

    run_verify(
        VerifyOptions(
            target=target,
            draft=draft,
            num_speculative_tokens=num_speculative_tokens,
            max_tokens=max_tokens,
            engine={
                "dtype": dtype,
                "device": device,
                "enforce_eager": enforce_eager,
                "cuda_graph_sizes": _sizes("--cuda-graph-sizes", cuda_graph_sizes),
                "cuda_graph_token_sizes": _sizes(
                    "--cuda-graph-token-sizes", cuda_graph_token_sizes
                ),
            },
            json=json,
        )
    )


@app.command()
def bench(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(help='directory, hub id, or "demo", the bundled pair')
    ] = "demo",
    draft: Annotated[
        str | None, typer.Option(help='EAGLE draft; default: "demo" for "demo", else none')
    ] = None,
    suite: Annotated[str, typer.Option(help=SUITES)] = "protocol",
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="values of K; 0, plain decoding, is always one",
            show_default="0,3,5",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="requests at a time", show_default="1,8,32 on a GPU, 1 on a CPU"),
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(help="prompt lengths of the suite context", show_default=CONTEXTS)
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, max=4096, help="prompts at the small batches")
    ] = 8,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, help="default: prompts.json beside the target")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="tokens of each answer")] = 160,
    max_model_len: Annotated[
        int, typer.Option(min=2, max=1 << 24, help="longest context, but for the suite context")
    ] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="whole runs, the best of which counts")] = 2,
    num_rounds: Annotated[int, typer.Option(min=1, help="rounds timed by the device's clock")] = 30,
    rounds_of_memory: Annotated[
        int | None, typer.Option(min=1, help="rounds of the suite memory", show_default="1000")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(min=0, help="begin nothing more behind so many seconds")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Annotated[
        Path | None, typer.Option(help="write the last line's JSON to a file too")
    ] = None,
    charts: Annotated[
        Path | None, typer.Option(help="directory for PNG charts (needs matplotlib)")
    ] = None,
) -> None:
    """Measure speed beside plain decoding in the same process; refuse figures where outputs differ."""
    from specdec.bench.bench import BenchOptions
    from specdec.cli.bench import BenchCommand, default_batches, integers, refuse_unread, run_bench

    draft = draft or ("demo" if target == "demo" else None)
    suites = tuple(suite.split(","))
    refuse_unread(suites, draft, num_speculative_tokens, contexts, rounds_of_memory)
    run_bench(
        BenchCommand(
            command=context.obj,
            target=target,
            draft=draft,
            suites=suites,
            options=BenchOptions(
                ks=integers("--num-speculative-tokens", num_speculative_tokens or "0,3,5", most=32),
                batches=integers("--batch", batch or default_batches(device), least=1, most=4096),
                contexts=integers("--contexts", contexts or CONTEXTS, least=1, most=1 << 24),
                num_prompts=num_prompts,
                max_tokens=max_tokens,
                max_model_len=max_model_len,
                repeats=repeats,
                num_rounds=num_rounds,
                rounds_of_memory=rounds_of_memory or 1000,
                max_seconds=max_seconds,
            ),
            prompts=prompts,
            dtype=dtype,
            device=device,
            json=json,
            charts=charts,
        )
    )


def _sizes(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: give integers with commas between them") from None


def _set_up_logging(name: str) -> None:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise ValueError(f"SPECDEC_LOG={name!r}: give debug, info, warning or error")
    logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
    for package in ("specdec", "graphs", "weights"):
        logging.getLogger(package).setLevel(level)
