"""`specdec chat` as a user has it: on a terminal, in a pipe, and past its context."""

import builtins
import signal
import sys
from collections.abc import Callable
from io import StringIO

import pytest

from specdec import LLM, AsyncLLM, SamplingParams
from specdec.cli.figures import COLUMNS
from specdec.requests.stats import RequestStats

TEMPLATE = """{% for m in messages %}\
{% if m.role == "tool" %}{{ raise_exception("no tools") }}{% endif %}\
# {{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}def{% endif %}"""


@pytest.fixture
def chat(run, monkeypatch, tmp_path):
    """chat(lines, *args): talk on a terminal; None is Ctrl-D, an exception is raised."""
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)

    def talk(lines: list[str | type[BaseException] | None], *args: str) -> tuple[int, str, str]:
        left = iter(lines)

        def read(prompt: str = "") -> str:
            line = next(left)
            if line is None:
                raise EOFError
            if not isinstance(line, str):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr(sys, "stdin", StringIO())
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        options = ("--draft", "demo", "--chat-template", str(file), "--max-tokens", "12")
        found = run("chat", "demo", *options, *args)
        assert list(left) == [], "the program ended too early"
        return found

    return talk


@pytest.fixture(scope="module")
def answers() -> Callable[..., str]:
    """answers(messages): what the target says to a conversation, without a draft."""
    llm = LLM("demo", device="cpu", max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=12)

    def answer(*contents: str, roles: tuple[str, ...] = ("user", "assistant") * 3) -> str:
        pairs = zip(roles, contents, strict=False)
        messages = [{"role": role, "content": content} for role, content in pairs]
        return llm.chat(messages, params, use_tqdm=False, chat_template=TEMPLATE)[0].outputs[0].text

    return answer


def test_chat_remembers_the_conversation_until_reset(chat, answers):
    code, out, err = chat(["sort a list", "  ", " again ", "/reset", "again", "/help", None])
    first = answers("sort a list")

    assert code == 0
    second = answers("sort a list", first, "again")
    assert out == f"{first}\n{second}\n{answers('again')}\n"
    assert err.count("12 tokens in") == err.count("acceptance length") == 3
    assert "no command /help: there are /reset and /exit" in err


def test_what_chat_says_by_itself_fits_60_columns(chat, monkeypatch):
    monkeypatch.setattr("specdec.cli.figures.LEAST_ROUNDS", 1)
    monkeypatch.setattr(RequestStats, "mean_acceptance_length", property(lambda self: 1.05))
    lines = ["a", KeyboardInterrupt, "/help", "/exit"]
    options = ("--max-tokens", "24", "--temperature", "0.5")
    _, _, err = chat(lines, *options)
    said = [line.removeprefix("> ") for line in err.splitlines()[1:]]  # after what runs
    for words in ("/reset starts", "no command /help", "/exit or", "hardly any"):
        assert any(words in line for line in said), words
    assert [line for line in said if len(line) > COLUMNS] == []


def test_chat_begins_with_the_system_message_even_after_a_reset(chat, answers):
    _, out, _ = chat(["a", "/reset", "a", "/exit"], "--system", "be brief")

    assert out == 2 * (answers("be brief", "a", roles=("system", "user")) + "\n")


def test_ctrl_c_at_the_prompt_drops_the_line_only(chat, answers):
    code, out, err = chat([KeyboardInterrupt, "a", None])

    assert (code, out) == (0, answers("a") + "\n")
    assert "/exit or Ctrl-D ends the program" in err


def test_ctrl_c_ends_an_answer_and_keeps_its_beginning(chat, answers, monkeypatch):
    real, prompts = AsyncLLM.chat, []

    async def interrupted(self, messages, *args, **options):
        prompts.append([message["content"] for message in messages])
        async for output in real(self, messages, *args, **options):
            yield output
            if len(prompts) == 1 and len(output.outputs[0].token_ids) > 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(AsyncLLM, "chat", interrupted)
    code, out, err = chat(["a", "b", None])

    beginning = prompts[1][1]
    assert code == 0
    assert "(interrupted)" in err
    assert answers("a").startswith(beginning) != (beginning == "")
    assert len(beginning) < len(answers("a"))
    assert prompts == [["a"], ["a", beginning, "b"]]
    assert out == f"{beginning}\n{answers('a', beginning, 'b')}\n"


def test_a_conversation_that_is_too_long_can_start_over(chat, answers):
    lines = ["a", "word " * 100, "b", "/reset", "a", None]
    code, out, err = chat(lines, "--max-model-len", "64")

    first = answers("a")
    assert (code, out) == (0, f"{first}\n{answers('a', first, 'b')}\n{first}\n")
    assert "leaves no room for an answer in --max-model-len 64" in err
    assert "/reset starts over" in err.split("leaves no room")[1]


def test_without_a_terminal_chat_answers_standard_input(run, answers, monkeypatch, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    args = ("chat", "demo", "--chat-template", str(file), "--max-tokens", "12")
    monkeypatch.setattr(sys, "stdin", StringIO("sort\na list\n"))
    code, out, err = run(*args)
    monkeypatch.setattr(sys, "stdin", StringIO(""))

    assert (code, out) == (0, answers("sort\na list") + "\n")
    assert "12 tokens in" in err
    assert run(*args)[::2] == (2, "specdec: error: no message: standard input is empty\n")


def test_chat_says_with_which_seed_an_answer_was_drawn(chat):
    _, first, err = chat(["a", None], "--temperature", "0.9")
    seed = err.split("seed ")[1].split()[0]

    assert chat(["a", None], "--temperature", "0.9", "--seed", seed)[1] == first
