"""`specdec chat`: a conversation on a terminal, or one message on standard input and its answer.

Answers go to stdout as they are written, everything else to stderr. The engine runs in its own
thread, which Ctrl-C does not reach: Ctrl-C only cancels the answer, and what was written of it
stays in the conversation.
"""

import asyncio
import readline  # noqa: F401  for input(): line editing and history
import sys

import specdec
from specdec.cli.before_torch import check_models
from specdec.cli.choices import ChatOptions
from specdec.cli.figures import note_seed, report, say_what_runs
from specdec.cli.generate import sampling_params
from specdec.cli.readers import read_input
from specdec.config import EngineConfig
from specdec.options import EngineOptions
from specdec.requests.chat_template import check_template
from specdec.requests.output import RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.tokenizer import Tokenizer
from specdec.start.locate import locate_tokenizer

WELCOME = "/reset starts over, Ctrl-C ends an answer,\n/exit or Ctrl-D the program"


def run_chat(options: ChatOptions) -> None:
    """Load, and answer each message."""
    params = sampling_params(options)
    engine: EngineOptions = {"max_num_seqs": 1, **options.engine}
    check_models(options.target, options.speculation, engine)
    check_template(options.chat_template)
    if options.chat_template is None:  # before anything large is read
        directory = locate_tokenizer(options.target, EngineConfig(**options.engine))
        if not Tokenizer(directory).has_chat_template:
            missing = f"target {options.target}: its tokenizer has no chat template"
            raise ValueError(f"{missing}: give --chat-template FILE, or use specdec generate")
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    message = "" if is_terminal else read_input("message")
    with specdec.AsyncLLM(options.target, speculative_config=options.speculation, **engine) as llm:
        say_what_runs(llm.llm)
        note_seed(options.sampling.seed, params.temperature)
        chat = Chat(llm, params, options)
        if is_terminal:
            chat.talk()
        else:
            chat.answer(message)


class Chat:
    """Holds a conversation with an engine. Its first message may be the system's, which stays."""

    def __init__(
        self, llm: "specdec.AsyncLLM", params: SamplingParams, options: ChatOptions
    ) -> None:
        self._llm = llm
        self._params = params
        self._options = options
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        self._beginning = system
        self.messages = list(system)
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
                try:
                    self.answer(line)
                except KeyboardInterrupt:
                    print("(interrupted)", file=sys.stderr)
                except ValueError as error:  # too long a conversation, or its template refuses it
                    words = self._options.wording.line(error)
                    print(f"specdec: error: {words}\n/reset starts over", file=sys.stderr)

    def answer(self, message: str) -> None:
        """Print the answer to a message and its statistics; add both to the conversation."""
        self._output = None
        messages = [*self.messages, {"role": "user", "content": message}]
        try:
            asyncio.run(self._write(messages))
        finally:
            if self._output is not None:
                print(flush=True)
                if not report(self._output, self._options):
                    answer = {"role": "assistant", "content": self._output.outputs[0].text}
                    self.messages = [*messages, answer]

    async def _write(self, messages: list[dict[str, str]]) -> None:
        num_written = 0
        template = self._options.chat_template
        async for output in self._llm.chat(messages, self._params, chat_template=template):
            self._output = output
            text = output.outputs[0].text
            print(text[num_written:], end="", flush=True)
            num_written = len(text)


def _read_line() -> str | None:
    """Read a stripped line; None at the end of the input. Ctrl-C only drops what was typed."""
    while True:
        try:
            if sys.stdout.isatty():  # readline sees the prompt
                return input("> ").strip()
            print("> ", end="", file=sys.stderr, flush=True)
            return input().strip()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D ends the program", file=sys.stderr)
