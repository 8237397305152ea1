"""Help and the answers to mistakes come before torch is imported, in little processor time."""

import json
import os
import socket
import subprocess
import sys

import pytest

from specdec.cli.choices import WIDE_SHAPES
from tests.specdec.cli.test_mistakes import MISTAKES, ROOT, make_place
from weights.widen import SHAPES

# what only a checkpoint, a file of prompts or an extra that is missing shows
READ_FIRST = (
    *("generate {} x", "generate {}/bin x", "generate {}/eagle3 x", "convert {}"),
    *("bench --prompts {}/text", "bench --charts {}"),
)
SERVE = [
    ("serve ./nowhere", "target ./nowhere: no such directory"),
    ("serve demo --draft ./nowhere", "draft ./nowhere: no such directory"),
    ("serve demo --host nowhere.invalid --port 0", "--host nowhere.invalid and --port 0: "),
    ("serve demo --log-format xml", "--log-format 'xml': allowed are text, json"),
    ("serve demo --max-num-seqs 0", "--max-num-seqs 0: give an integer from 1 to 4096"),
    ("batch {}/text {}/out ./nowhere", "target ./nowhere: no such directory"),
    ("batch {}/text {}/out demo --num-engines 2", "--num-engines 2 without a cluster"),
    ("load demo --dtype int8", "--dtype 'int8': allowed are auto, float32"),
    ("load demo --device gpu", "--device 'gpu': give auto, cpu, cuda or cuda:N"),
    ("inspect ./nowhere", "checkpoint ./nowhere: no such directory"),
    ("inspect demo/eagle3 --target ./nowhere", "target ./nowhere: no such directory"),
    ("tune ./nowhere", "target ./nowhere: no such directory"),
    ("tune demo --dtype int8", "--dtype 'int8': allowed are auto, float32"),
    ("widen ./out --dtype int8", "--dtype 'int8': allowed are bfloat16, float32"),
    ("bench ./nowhere", "target ./nowhere: no such directory"),
    ("chat ./nowhere", "target ./nowhere: no such directory"),
    ("verify demo ./nowhere", "draft ./nowhere: no such directory"),
]


WITHOUT_TORCH = """
import contextlib, io, json, sys
for name in ("torch", "transformers"):
    sys.modules[name] = None  # an import of it fails
from specdec.cli import main
found = []
for args in json.load(sys.stdin):
    err = io.StringIO()
    sys.stdin = io.StringIO("\\n")
    try:
        with contextlib.redirect_stderr(err):
            main(args)
    except SystemExit as left:
        found.append([left.code, err.getvalue()])
    except BaseException as error:
        found.append([None, repr(error)])
print(json.dumps(found))
"""


def test_mistakes_are_answered_without_torch(tmp_path):
    place = make_place(tmp_path)
    mistakes = [(args, words) for args, words in [*MISTAKES, *SERVE] if args not in READ_FIRST]
    assert len(mistakes) == len(MISTAKES) + len(SERVE) - len(READ_FIRST)
    given = [args.split() if isinstance(args, str) else args for args, _ in mistakes]
    lines = [[arg.replace("{}", str(place)) for arg in args] for args in given]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    for args, (_, words), (code, err) in zip(lines, mistakes, json.loads(done.stdout), strict=True):
        assert code == 2, (args, err)
        assert words.replace("{}", str(place)) in err, args


def processor_seconds(*args: str) -> float:
    """The least of a command's processor time, its own processes' included, in two runs."""
    found = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec", *args],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == (0 if "--help" in args else 2)
        found.append(usage.ru_utime + usage.ru_stime)
    return min(found)


@pytest.mark.parametrize(
    "args",
    [
        *("--help", "serve --help", "generate demo x --temperature -1", "serve ./nowhere"),
        *("chat demo --chat-template README.md --max-tokens 0", "bench demo --suite speed"),
    ],
)
def test_help_and_answers_to_mistakes_take_less_than_a_second(args):
    assert processor_seconds(*args.split()) < 1


def test_a_used_port_is_told_in_less_than_a_second():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert processor_seconds("serve", "demo", "--port", port) < 1


def test_shapes_are_known_without_reading_them():
    assert tuple(SHAPES) == WIDE_SHAPES
