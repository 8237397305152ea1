"""Chat templates write what transformers writes; none can hang, fill memory or leave a process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from specdec.requests import template_worker
from specdec.requests.chat_format import ChatFormat
from specdec.requests.chat_template import TemplateProcess, check_template
from specdec.requests.tokenizer import Tokenizer
from weights.demo import demo_directory

DEMO = Tokenizer(demo_directory("target"))
TALK = [
    {"role": "system", "content": " Be <brief> & 'kind'. "},
    {"role": "user", "content": "Sort\n[3, 1]\u00e9\U0001f642"},
    {
        "role": "assistant",
        "content": "<think>\neasy\n</think>\n\n[1, 3]",
        "reasoning": "easy",
        "name": None,
    },
    {"role": "user", "content": "again"},
]
HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\n' + system + '<|eot|>' }}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""
MARKUP = """{% for message in messages %}
    {% if loop.first and messages[0].role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
THINKING = """{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == 'user' %}{% set ns.found = true %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.reasoning_content is defined %}[{{ message.reasoning_content }}|{{ message.thinking }}]{% endif %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
    {%- if message.name is defined %}NAME{% endif %}
    {{- loop.index0 ~ (' last ' if loop.index0 == ns.last else ' ') ~ content ~ '\\n' }}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
{%- endfor %}
{{- ns.last }}{{ documents is none }}{{ enable_thinking is defined }}"""  # noqa: E501
INSTRUCTIONS = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {{- "[INST]" + (system + "\\n\\n" if loop.last and system is defined else "") + message.content + "[/INST]" }}
    {%- else %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{%- endif %}
{%- endfor %}"""  # noqa: E501
MACROS = """{% macro turn(message, depth=0) %}{{ '  ' * depth }}{{ message | tojson }}
{% endmacro %}{% for message in messages if message.role != 'system' %}{% continue %}{% endfor %}
{{ dict(a=1, **{'b': messages[0]}) | tojson(sort_keys=true, separators=(',', ':')) }}
{{ turn(messages[0], 2) }}{{ messages | map(attribute='role') | join(', ') | upper }}{{ missing }}{{ '%5.1f' % 2 }}"""  # noqa: E501
TEMPLATES = {
    "headers": HEADERS,
    "markup": MARKUP,
    "thinking": THINKING,
    "instructions": INSTRUCTIONS,
    "macros": MACROS,
    "empty": "",
}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [TALK, TALK[1:], TALK[1:2]], ids=["system", "long", "short"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_written_as_transformers_writes_it(name, messages, add_generation_prompt):
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": add_generation_prompt}
    text = DEMO.in_transformers.apply_chat_template(messages, tokenize=False, **options)
    tokens = DEMO.in_transformers.apply_chat_template(messages, return_dict=False, **options)

    assert DEMO.write_chat(messages, ChatFormat(**options)) == text
    assert DEMO.encode_chat(messages, ChatFormat(**options)) == list(tokens)


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('no tools') }}", "no tools"),
        ("{{ messages.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(_a=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", "underscore"),
        ("{% endfor %}", "unknown tag"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange too big"),
        ("{{ 5 + 'a' }}", "unsupported operand"),
    ],
)
def test_an_error_of_a_template_is_reported(template, message):
    with pytest.raises(
        ValueError, match=f"the chat template does not take these messages: .*{message}"
    ):
        DEMO.encode_chat(TALK, ChatFormat(chat_template=template))


NEVER_ENDING = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 10) }}",  # one long call in C, while it is compiled
}
TOO_LARGE = {
    "text": "{{ 'a' * 20000000 }}",
    "a constant": "{{ 'a' * 2000000000 }}",
    "pieces": "{% for i in range(99999) %}{{ '" + "a" * 200 + "' }}{% endfor %}",
    "doubled text": "{% set n = namespace(x='a') %}"
    "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a doubled list": "{% set n = namespace(x=[1]) %}"
    "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a format": "{{ '{:1000000000}'.format(1) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "indent": "{{ 'a\\nb' | indent(10 ** 9) }}",
    "json": "{{ [1] | tojson(indent=10 ** 9) }}",
    "joined": "{{ (['a' * 10 ** 6] * 10 ** 6) | join }}",
    "unused": "{% set x = 'a' * 10 ** 9 %}",
    "an error": "{{ raise_exception('a' * 10 ** 9) }}",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "loops")) for name in NEVER_ENDING],
)
def test_a_template_that_never_ends_is_stopped(name):
    start = time.monotonic()
    with pytest.raises(ValueError, match="does not take these messages: it was stopped after 2 s"):
        DEMO.encode_chat(TALK, ChatFormat(chat_template=NEVER_ENDING[name]))
    assert time.monotonic() - start < 6
    assert DEMO.write_chat(TALK, ChatFormat(chat_template="{{ messages[3].content }}")) == "again"


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_template_that_writes_or_holds_too_much_is_refused(name):
    start = time.monotonic()
    with pytest.raises(
        ValueError, match=r"these messages: it (writes|needs|was stopped after)"
    ) as caught:
        DEMO.encode_chat(TALK, ChatFormat(chat_template=TOO_LARGE[name]))
    assert time.monotonic() - start < 6
    assert len(str(caught.value)) < 3000
    assert DEMO.write_chat(TALK, ChatFormat(chat_template="{{ messages[3].content }}")) == "again"


def test_the_longest_text_is_written_in_any_script():
    character = "\U0001f642"  # four bytes, as in memory
    text = TemplateProcess().render(
        "{{ x ~ '' }}", {"x": character * (template_worker.TEXT_BYTES // 4)}
    )
    assert text == character * (template_worker.TEXT_BYTES // 4)


def test_an_error_is_cut():
    with pytest.raises(ValueError, match="aaa") as caught:
        DEMO.write_chat(TALK, ChatFormat(chat_template="{{ raise_exception('a' * 10 ** 6) }}"))
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("value", [object(), b"a", {1, 2}])
def test_values_that_are_not_json_are_refused(value):
    with pytest.raises(ValueError, match="messages may hold text, numbers, lists and dicts only"):
        DEMO.write_chat(
            [{"role": "user", "content": "a", "image": value}], ChatFormat(chat_template="a")
        )


@pytest.mark.parametrize("template", [5, ["a"], b"a"])
def test_a_template_is_text(template):
    with pytest.raises(ValueError, match="give Jinja text"):
        DEMO.write_chat(TALK, ChatFormat(chat_template=template))


# the process


def test_no_process_runs_before_the_first_conversation():
    assert Tokenizer(demo_directory("target"))._templates._process is None


def test_one_process_serves_all_threads():
    process = TemplateProcess()
    texts = {}

    def write(number):
        texts[number] = process.render("{{ x }}" * 3, {"x": number})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: str(number) * 3 for number in range(16)}


def test_a_template_that_hangs_does_not_hold_up_an_event_loop():
    async def run():
        started = asyncio.create_task(
            asyncio.to_thread(
                DEMO.write_chat, TALK, ChatFormat(chat_template=NEVER_ENDING["a power"])
            )
        )
        ticks = 0
        while not started.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return started.exception(), ticks

    error, ticks = asyncio.run(run())
    assert isinstance(error, ValueError)
    assert ticks > 20


def test_a_killed_process_is_started_again():
    process = TemplateProcess()
    assert process.render("a", {}) == "a"
    first = process._process
    first.kill()
    first.wait()
    assert process.render("b", {}) == "b"
    assert process._process.pid != first.pid


def test_an_interrupted_conversation_is_not_the_answer_to_the_next():
    process = TemplateProcess()
    process.render("", {})
    timer = threading.Timer(0.3, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    start = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        process.render(NEVER_ENDING["loops"], {})
    assert time.monotonic() - start < 1.5
    assert process.render("b", {}) == "b"


def test_the_process_ends_with_its_owner():
    process = TemplateProcess()
    process.render("", {})
    child = process._process
    del process
    assert child.returncode == -signal.SIGKILL, "ended, and waited for"


def test_a_forked_process_renders_with_its_own_and_leaves_the_parents():
    process = TemplateProcess()
    process.render("", {})
    child = process._process
    forked = os.fork()
    if forked == 0:
        os._exit(0 if process.render("b", {}) == "b" and process._process is not child else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert process.render("c", {}) == "c"
    assert process._process is child


def run_script(tmp_path, code, **options):
    file = tmp_path / "script.py"
    file.write_text(code)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen([sys.executable, str(file)], env=environment, **options)


BEGIN = (
    "from specdec.requests.chat_template import TemplateProcess\n"
    "process = TemplateProcess()\n"
    "assert process.render('a', {}) == 'a'\n"
    "open('pid', 'w').write(str(process._process.pid))\n"
)


def wait_until_gone(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    "end",
    [
        "",
        "import os; os.kill(os.getpid(), 9)",
        pytest.param("import os; os._exit(0)", marks=pytest.mark.slow),
        pytest.param("1 / 0", marks=pytest.mark.slow),
    ],
)
def test_no_process_outlives_its_parent(tmp_path, end):
    run_script(tmp_path, BEGIN + end, cwd=tmp_path, stderr=subprocess.DEVNULL).wait()
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_a_process_that_hangs_does_not_outlive_its_parent(tmp_path):
    hang = BEGIN + f"process.render({NEVER_ENDING['a power']!r}, {{}})"
    parent = run_script(tmp_path, hang, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


def test_templates_are_rendered_where_standard_streams_are_closed(tmp_path):
    code = (
        "import os\nfor number in range(3): os.close(number)\n"
        + BEGIN
        + "assert process.render('b', {}) == 'b'\n"
        "open('done', 'w').write('yes')"
    )
    assert run_script(tmp_path, code, cwd=tmp_path).wait(timeout=60) == 0
    assert (tmp_path / "done").read_text() == "yes"


def test_a_script_without_a_main_guard_runs_once_and_signals_are_not_handed_down(tmp_path):
    code = (
        "import signal\nopen('ran', 'a').write('x')\n"
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))\n" + BEGIN + "try:\n"
        f"    process.render({NEVER_ENDING['loops']!r}, {{}})\n"
        "except ValueError: open('cut', 'w')\n"
    )
    assert run_script(tmp_path, code, cwd=tmp_path).wait(timeout=60) == 0
    assert (tmp_path / "ran").read_text() == "x"
    assert (tmp_path / "cut").exists()


def test_the_worker_needs_no_more_than_jinja2():
    code = (
        f"import runpy, sys, json; runpy.run_path({template_worker.__file__!r}); "
        "print(json.dumps(list(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    tops = {name.partition(".")[0] for name in json.loads(found)}
    assert "jinja2" in tops
    assert not tops & {"torch", "transformers", "numpy", "specdec", "tokenizers"}


def test_a_template_is_checked_without_a_conversation():
    for valid in (None, HEADERS, MARKUP, "{{ raise_exception('no messages') }}", "a name"):
        check_template(valid)
    for invalid in ("{% for m in messages %}", "{{ 1 + }}", "{{ messages | no_such_filter }}"):
        with pytest.raises(ValueError, match=r"^chat_template is no valid Jinja: "):
            check_template(invalid)
