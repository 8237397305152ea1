"""`specdec chat`: a conversation on a terminal, or one message on standard input and its answer.

Answers go to stdout as they are written, everything else to stderr. The engine runs in its own
thread, which Ctrl-C does not reach: Ctrl-C only cancels the answer, and what was written of it
stays in the conversation.
"""

import asyncio
import readline  # noqa: F401  for input(): line editing and history
import sys
from dataclasses import dataclass

from specdec.cli.generate import (
    TextOptions,
    headline,
    sampling_params,
    speculation_of,
    stats_line,
)
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.tokenizer import Tokenizer
from specdec.serve.async_llm import AsyncLLM
from specdec.start.locate import locate

WELCOME = "/reset starts over, Ctrl-C ends an answer, /exit or Ctrl-D the program"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(TextOptions):
    """chat_template: Jinja text."""

    system: str | None
    chat_template: str | None


def run_chat(options: ChatOptions) -> None:
    """Load, and answer each message."""
    params = sampling_params(options.sampling)
    speculation = speculation_of(options)
    if options.chat_template is None:
        _check_template(options.target)
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    message = "" if is_terminal else _only_message()
    with AsyncLLM(options.target, speculation, max_num_seqs=1, **options.engine) as llm:
        print(headline(llm.llm), file=sys.stderr)
        chat = Chat(llm, params, options.chat_template, options.system)
        if is_terminal:
            chat.talk()
        else:
            chat.answer(message)


def _check_template(target: str) -> None:
    """Before anything large is read."""
    if not Tokenizer(locate(target, "target")).has_chat_template:
        raise ValueError(
            f"target {target}: its tokenizer has no chat template: give --chat-template FILE, "
            "or use specdec generate"
        )


def _only_message() -> str:
    # None: the caller closed it
    message = "" if sys.stdin is None else sys.stdin.read().removesuffix("\n")
    if not message:
        raise ValueError("no message: standard input is empty")
    return message


class Chat:
    """A conversation with an engine. system: its first message, which /reset keeps."""

    def __init__(
        self, llm: AsyncLLM, params: SamplingParams, template: str | None, system: str | None
    ) -> None:
        self._llm = llm
        self._params = params
        self._template = template
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._beginning)
        self._output: RequestOutput | None = None  # the current answer so far

    def talk(self) -> None:
        """Read lines and answer them until the input ends."""
        print(WELCOME, file=sys.stderr)
        while (line := _read_line()) is not None and line != "/exit":
            if line == "/reset":
                self.messages = list(self._beginning)
            elif line.startswith("/") and line[1:].isalpha():
                print(f"no command {line}: there are /reset and /exit", file=sys.stderr)
            elif line:
                self._answer_in_turn(line)

    def answer(self, message: str) -> None:
        """Print the answer to a message and its statistics; add both to the conversation."""
        self._output = None
        messages = [*self.messages, {"role": "user", "content": message}]
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
        except ValueError as error:  # the conversation is too long, or its template refuses it
            print(f"specdec: error: {error}\n/reset starts over", file=sys.stderr)

    async def _write(self, messages: list[dict[str, str]]) -> None:
        num_written = 0
        async for output in self._llm.chat(messages, self._params, chat_template=self._template):
            self._output = output
            text = output.outputs[0].text
            print(text[num_written:], end="", flush=True)
            num_written = len(text)

    def _end(self, messages: list[dict[str, str]], output: RequestOutput) -> None:
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            print(f"specdec: error: {completion.stop_reason}", file=sys.stderr)
        else:
            self.messages = [*messages, {"role": "assistant", "content": completion.text}]
        is_drawn = output.seed is not None and self._params.temperature > 0
        seed = f"seed {output.seed} | " if is_drawn else ""
        print(seed + stats_line(output.stats), file=sys.stderr)


def _read_line() -> str | None:
    """A stripped line; None at the end of the input. Ctrl-C only drops what was typed."""
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
