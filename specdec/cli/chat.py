"""`specdec chat`: a conversation on a terminal, or one message on standard input and its answer.

Answers go to stdout as they are written, everything else to stderr. The engine runs in a thread of its own, which
Ctrl-C does not reach: it cancels the answer, whose beginning stays in the conversation, and nothing else.
"""

import asyncio
import readline  # noqa: F401  input() edits its line and remembers the ones before
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specdec.cli.generate import headline, read_text, sampling_params, speculation_of, stats_line
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.tokenizer import Tokenizer
from specdec.serve.async_llm import AsyncLLM
from specdec.start.locate import locate

COMMANDS = ("/reset", "/exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The command line as given. sampling and engine: arguments of SamplingParams and LLM."""

    target: str
    draft: str | None
    num_speculative_tokens: int | None
    acceptance: str
    system: str | None
    chat_template: Path | None
    sampling: Mapping[str, object]
    engine: Mapping[str, object]


def run_chat(options: ChatOptions) -> None:
    """Load, and answer what comes."""
    params = sampling_params(options.sampling)
    speculation = speculation_of(options.draft, options.num_speculative_tokens, options.acceptance)
    template = (
        None
        if options.chat_template is None
        else read_text("--chat-template", options.chat_template)
    )
    if template is None:
        _check_template(options.target)
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    message = "" if is_terminal else _only_message()
    with AsyncLLM(options.target, speculation, **options.engine) as llm:
        print(headline(llm.llm), file=sys.stderr)
        chat = Chat(llm, params, template, options.system)
        if is_terminal:
            chat.talk()
        else:
            chat.answer(message)


def _check_template(target: str) -> None:
    """Before anything large is read."""
    if not Tokenizer(locate(target, "target")).has_chat_template:
        raise ValueError(
            f"target {target}: its tokenizer has no chat template: give --chat-template FILE, or use specdec generate"
        )


def _only_message() -> str:
    message = (
        "" if sys.stdin is None else sys.stdin.read().removesuffix("\n")
    )  # None: closed by who called
    if not message:
        raise ValueError("no message: standard input is empty")
    return message


class Chat:
    """A conversation and what answers it. system: its first message, which /reset keeps."""

    def __init__(
        self, llm: AsyncLLM, params: SamplingParams, template: str | None, system: str | None
    ) -> None:
        self._llm, self._params, self._template = llm, params, template
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._beginning)
        self._output: RequestOutput | None = None  # of the answer, so far

    def talk(self) -> None:
        """Read lines and answer them until the input ends."""
        print(
            "/reset begins anew, Ctrl-C ends an answer, /exit or Ctrl-D the program",
            file=sys.stderr,
        )
        while (line := _read_line()) is not None and line != "/exit":
            if line == "/reset":
                self.messages = list(self._beginning)
            elif line.startswith("/") and line[1:].isalpha():
                print(f"no command {line}: there are {' and '.join(COMMANDS)}", file=sys.stderr)
            elif line:
                self._answer_in_turn(line)

    def answer(self, message: str) -> None:
        """Print the answer to a message and its figures. The conversation grows if there was any answer."""
        self._output, messages = None, [*self.messages, {"role": "user", "content": message}]
        try:
            asyncio.run(self._write(messages))
        finally:
            if self._output is not None:
                print(flush=True)
                self._end(messages, self._output)

    def _answer_in_turn(self, message: str) -> None:
        try:
            self.answer(message)
        except KeyboardInterrupt:
            print("(interrupted)", file=sys.stderr)
        except (
            ValueError
        ) as error:  # the conversation has become too long, or the template does not take it
            print(f"specdec: error: {error}\n/reset begins anew", file=sys.stderr)

    async def _write(self, messages: list[dict[str, str]]) -> None:
        num_written = 0
        async for output in self._llm.chat(messages, self._params, chat_template=self._template):
            self._output, text = output, output.outputs[0].text
            print(text[num_written:], end="", flush=True)
            num_written = len(text)

    def _end(self, messages: list[dict[str, str]], output: RequestOutput) -> None:
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            print(f"specdec: error: {completion.stop_reason}", file=sys.stderr)
        else:
            self.messages = [*messages, {"role": "assistant", "content": completion.text}]
        seed = (
            "" if output.seed is None or self._params.temperature == 0 else f"seed {output.seed} | "
        )
        print(seed + stats_line(output.stats), file=sys.stderr)


def _read_line() -> str | None:
    """A line without the blanks around it; None at the end of the input. Ctrl-C only drops what was typed."""
    while True:
        try:
            if sys.stdout.isatty():
                return input("> ").strip()
            print("> ", end="", file=sys.stderr, flush=True)
            return input().strip()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D ends the program", file=sys.stderr)
