"""While a hostile body of up to 8 MiB is read and answered, /health answers and memory stays low.

python -m pytest -n 0 -m slow -s tests/specdec/serve/http/test_stalls.py     prints a line each
"""

import json
import threading
import time
from pathlib import Path

import httpx2
import pytest

pytestmark = pytest.mark.slow

SECONDS = 0.2
TRIES = 3  # on a machine with other work
MEMORY_MIB = 100  # of the whole process, with the client's own copies
SIZE = (8 << 20) - 200
CHAT, COMPLETION, RESPONSES, MESSAGES = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/messages"),
)
USER = '"max_tokens":1,"messages":[{"role":"user","content":"x"}]'


def filled(head, unit, tail, size=SIZE, most=1 << 40):
    """A body of that many bytes, or of that many units."""
    count = min((size - len(head) - len(tail)) // (len(unit) + 1), most)
    return (head + ",".join([unit] * count) + tail).encode()


def numbered(head, unit, tail, most):
    """A body of units with a number each."""
    return (head + ",".join(unit.replace("#", str(i)) for i in range(most)) + tail).encode()


def text(head, unit, tail):
    """A text of the same characters."""
    return (head + unit * ((SIZE - len(head) - len(tail)) // len(unit.encode())) + tail).encode()


BODIES = {
    "nested lists": (COMPLETION, filled('{"prompt":[', "[[[[[[[[]]]]]]]]", "]}")),
    "empty lists": (COMPLETION, filled('{"prompt":[', "[]", "]}")),
    "objects": (COMPLETION, filled('{"prompt":[', '{"a":1}', "]}")),
    "strings": (COMPLETION, filled('{"prompt":[', '""', "]}")),
    "numbers": (COMPLETION, filled('{"prompt":[', "5", "]}")),
    "token ids": (COMPLETION, filled('{"prompt":[', "5", "]}", most=1_000_000)),
    "prompts": (COMPLETION, filled('{"prompt":[', f"[{','.join('5' * 1000)}]", "]}", most=500)),
    "wrong ids": (COMPLETION, filled('{"prompt":[', f"[{'5,' * 500}1.5]", "]}", most=1000)),
    "an object of floats": (COMPLETION, filled('{"prompt":{"a":[', "1.2345678901234567", "]}}")),
    "floats": (COMPLETION, filled('{"prompt":[', "1.234567890123456789e-300", "]}")),
    "a temperature of floats": (
        COMPLETION,
        filled('{"prompt":"x","temperature":[', "1.2345678901234567", "]}", most=130_000),
    ),
    "a stop of lists": (COMPLETION, filled('{"prompt":"x","stop":[[', "5", "]]}", most=130_000)),
    "allowed ids": (
        COMPLETION,
        numbered('{"prompt":"x","max_tokens":1,"allowed_token_ids":[', "#", "]}", 1 << 10),
    ),
    "allowed wrong ids": (
        COMPLETION,
        numbered('{"prompt":"x","max_tokens":1,"allowed_token_ids":[', "#", "]}", 1 << 16),
    ),
    "long integers": (COMPLETION, filled('{"prompt":[', "9" * 4299, "]}")),
    "escapes": (COMPLETION, text('{"prompt":"', r"a\n", '"}')),
    "quotes": (COMPLETION, text('{"prompt":"', r"\",", '"}')),
    "characters": (COMPLETION, text('{"prompt":"', "\N{LATIN SMALL LETTER E WITH ACUTE}", '"}')),
    "a long name": (COMPLETION, text('{"prompt":"x","', "a", '":1}')),
    "fields": (COMPLETION, numbered('{"prompt":"x",', '"#":1', "}", 250_000)),
    "choices": (
        COMPLETION,
        numbered('{"prompt":"x","structured_outputs":{', '"#":1', "}}", 8000),
    ),
    "a schema": (COMPLETION, filled('{"prompt":"x","guided_json":{"enum":[', "5", "]}}")),
    "a schema of floats": (
        COMPLETION,
        filled('{"prompt":"x","guided_json":{"enum":[', "1.2345678901234567", "]}}", most=130_000),
    ),
    "a schema as text": (
        CHAT,
        filled("{" + USER + ',"guided_json":"[', "[]", ']"}'),
    ),
    "messages": (
        CHAT,
        filled('{"messages":[', '{"role":"user","content":"x"}', "]}", most=43_000),
    ),
    "parts": (
        CHAT,
        filled(
            '{"messages":[{"role":"user","content":[',
            '{"type":"text","text":"x"}',
            "]}]}",
            most=43_000,
        ),
    ),
    "calls": (
        CHAT,
        filled(
            '{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[',
            '{"id":"a","function":{"name":"n","arguments":"{}"}}',
            "]}]}",
            most=26_000,
        ),
    ),
    "arguments": (
        CHAT,
        filled(
            '{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"n",'
            '"arguments":"[',
            "[[[[]]]]",
            ']"}}]}]}',
        ),
    ),
    "template variables": (
        CHAT,
        filled("{" + USER + ',"chat_template_kwargs":{"a":[', "1.5", "]}}", most=130_000),
    ),
    "documents": (CHAT, filled("{" + USER + ',"documents":[', "{}", "]}", most=130_000)),
    "tools": (CHAT, filled("{" + USER + ',"tools":[', '{"type":"function"}', "]}", most=65_000)),
    "a tool's schema": (
        CHAT,
        filled(
            "{"
            + USER
            + ',"tool_choice":"required","tools":[{"type":"function","function":{"name":"n",'
            '"parameters":{"properties":{"a":{"enum":[',
            "5",
            "]}}}}}]}",
            most=130_000,
        ),
    ),
    "unknown names": (RESPONSES, numbered('{"input":"x",', '"name_#":1', "}", 40_000)),
    "unknown names of a message": (
        MESSAGES,
        numbered("{" + USER + ',"max_tokens":1,', '"name_#":1', "}", 400_000),
    ),
    "items": (
        RESPONSES,
        filled('{"input":[', '{"role":"user","content":"x"}', "]}", most=43_000),
    ),
    "arguments of a call": (
        RESPONSES,
        filled(
            '{"max_output_tokens":1,"input":[{"type":"function_call","call_id":"c","name":"n","arguments":"[',
            "[[[[]]]]",
            ']"}]}',
        ),
    ),
    "blocks": (
        MESSAGES,
        filled(
            '{"max_tokens":1,"messages":[{"role":"user","content":[',
            '{"type":"tool_result","tool_use_id":"t","content":"x"}',
            "]}]}",
            most=32_000,
        ),
    ),
    "metadata of a response": (
        RESPONSES,
        filled(
            '{"input":"x","max_output_tokens":1,"metadata":{"a":[',
            "1.2345678901234567",
            "]}}",
            most=130_000,
        ),
    ),
}


@pytest.fixture(scope="module")
def hit(serve):
    """hit(path, body): the answer, the longest wait for /health, and the growth of the peak."""
    with serve(is_apart=True) as live:
        yield lambda path, body: _hit(live, path, body)


def _hit(live, path, body):
    answers = []
    headers = {"Content-Type": "application/json"}
    reset_peak()
    before = peak_mib()
    send = threading.Thread(
        target=lambda: answers.append(live.post(path, content=body, headers=headers, timeout=600))
    )
    waits = []
    with httpx2.Client(base_url=live.url, timeout=600) as client:
        client.get("/health")
        send.start()
        while send.is_alive():
            start = time.perf_counter()
            assert client.get("/health").status_code == 200
            waits.append(time.perf_counter() - start)
            time.sleep(0.005)
    return answers[0], max(waits), peak_mib() - before


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


@pytest.mark.parametrize("name", BODIES)
def test_health_answers_while_a_hostile_body_is_read(hit, name):
    path, body = BODIES[name]
    assert len(body) <= 8 << 20
    for _ in range(TRIES):
        start = time.process_time()
        found, wait, growth = hit(path, body)
        seconds = time.process_time() - start
        what = f"{len(body) / 2**20:.1f} MiB, {found.status_code}, {seconds:.2f} s of processor"
        print(f"\n{name}: {what}, /health waits {wait:.3f} s, peak +{growth} MiB")
        if wait < SECONDS:
            break
    assert found.status_code in (200, 400)  # 402f048 says 413 for a prompt that does not fit
    assert found.status_code == 200 or len(found.content) < 2000
    assert json.loads(found.content)
    assert wait < SECONDS
    assert growth < MEMORY_MIB
