"""JSON from clients: what is read is what json.loads reads, and too much of it is never made."""

import gc
import json
import math
import time

import pytest

from specdec.requests import bounded_json
from specdec.requests.bounded_json import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, JsonSizeError
from specdec.requests.chat_format import INVALID, arguments_object

SIGNS = '[{,:"\\'
TEXTS = [
    *(
        "5",
        "-0.5e3",
        '"a"',
        "null",
        "true",
        " [1, 2.5, [], {}] ",
        '{"a": {"b": [null, "\\u00e9"]}}',
    ),
    *('{"a": 1, "a": 2}', '"\\ud83d\\ude00"', '"\\ud800"', "1e999", "[12345678901234567890]"),
    json.dumps([SIGNS, {SIGNS: SIGNS}]),
]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_read_is_what_json_reads(text):
    assert bounded_json.loads(text) == bounded_json.loads(text.encode()) == json.loads(text)


@pytest.mark.parametrize("text", ["", "{", "[1,]", '{"a"}', '"', "NaN", "[Infinity]", "-Infinity"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError, match=r"Expecting|Extra data|Unterminated|no number in JSON"):
        bounded_json.loads(text)


def test_nan_is_read_where_it_is_allowed():
    assert math.isnan(bounded_json.loads("NaN", allows_nan=True))


def listed(items):
    return f"[{','.join(items)}]"


MOST = {
    "values": listed(["1"] * (MAX_VALUES + 1)),
    "lists and objects": listed(["[]", "{}"] * (MAX_CONTAINERS // 2)),
    "strings": listed(['""'] * (MAX_STRINGS + 1)),
    "keys": "{" + ",".join(f'"{i}":""' for i in range(MAX_STRINGS // 2 + 1)) + "}",
    "levels": "[" * 5000 + "]" * 5000,
}


@pytest.mark.parametrize("name", MOST)
def test_too_much_is_refused_before_it_is_made(name):
    start = time.process_time()
    with pytest.raises(JsonSizeError, match=r"more than \d+ |too many levels"):
        bounded_json.loads(MOST[name])
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "text",
    [
        listed(["1"] * 100_000),
        json.dumps(SIGNS * (MAX_VALUES // 2)),
        json.dumps("\\" * MAX_VALUES),
        json.dumps(['"' * MAX_STRINGS] * 4),
        json.dumps([SIGNS * 10] * (MAX_STRINGS // 2)),
    ],
    ids=["ids", "signs", "backslashes", "quotes", "strings of signs"],
)
def test_signs_within_strings_are_no_values(text):
    assert bounded_json.loads(text) == json.loads(text)


def test_nothing_is_collected_while_a_text_is_read():
    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        found = bounded_json.loads(listed(["[[]]"] * 50_000))
        during = len(seen)
    finally:
        gc.callbacks.pop()
    assert len(found) == 50_000
    assert during <= 2  # the start and the end of one that has waited
    assert gc.isenabled()


def test_collections_that_were_off_stay_off_after_an_error():
    gc.disable()
    try:
        with pytest.raises(ValueError, match="Expecting"):
            bounded_json.loads("{")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_arguments_of_a_call_are_bounded():
    hostile = '{"a": ' + listed(["[]"] * MAX_CONTAINERS) + "}"
    start = time.process_time()
    assert arguments_object(hostile) == {INVALID: hostile}
    assert time.process_time() - start < 0.2
    assert arguments_object('{"a": NaN}').keys() == {"a"}
