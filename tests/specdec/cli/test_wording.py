"""Errors of the engine in the words of the command line."""

from pathlib import Path

import pytest
from typer.main import get_command

from specdec.cli import app
from specdec.cli.errors import Wording, wording_of
from weights.errors import CheckpointError


def of(command: str, has_length: bool = True) -> Wording:
    return wording_of(get_command(app), [command, *(["--max-model-len=9"] if has_length else [])])


@pytest.mark.parametrize(
    "text, words",
    [
        ("max_model_len=64: raise max_model_len", "--max-model-len 64: raise --max-model-len"),
        ("enforce_eager=True captures nothing", "--enforce-eager captures nothing"),
        ("give an integer, or None to have one drawn", "give an integer, or leave it out"),
        ("lower max_num_batched_tokens=8192 or max_num_seqs=64", "lower --max-num-seqs 64"),
        (
            "lower gpu_memory_utilization, max_num_seqs or max_num_batched_tokens (full)",
            "lower --gpu-memory-utilization or --max-num-seqs (full)",
        ),
        (
            "need 9 blocks, num_kv_blocks=5: raise num_kv_blocks, or lower max_tokens",
            "need 9 blocks, there are 5: lower --max-tokens",
        ),
        ("model='': give a directory", "--draft '': give a directory"),
        ("two\n  lines", "two lines"),
        ("/a/seed=1/x chat_template.jinja prompt", "/a/seed=1/x chat_template.jinja prompt"),
    ],
)
def test_arguments_are_named_by_their_options(text, words):
    assert of("generate").line(ValueError(text)) == words


def test_a_command_names_only_its_own_options():
    assert of("verify").line(ValueError("give a chat_template")) == "give a chat_template"
    assert of("chat").line(ValueError("give a chat_template")) == "give a --chat-template"


def test_nobody_is_told_to_raise_the_longest_length():
    error = ValueError("at most 63 tokens, or raise max_model_len")
    assert of("chat", has_length=False).line(error) == "at most 63 tokens"
    assert of("chat").line(error) == "at most 63 tokens, or raise --max-model-len"


def test_one_problem_of_a_checkpoint_is_one_line():
    one = CheckpointError(Path("d"), ("config.json: not there",))
    two = CheckpointError(Path("d"), ("a: not there", "b: not there"))

    assert of("load").line(one) == "d: config.json: not there; nothing loaded"
    assert of("load").line(two) == str(two)


def test_a_problem_of_a_checkpoint_names_keys_and_the_option_of_a_length():
    line = "config.json: num_kv_blocks=5, dtype=1: give a max_model_len of at most 8"
    words = of("generate").line(CheckpointError(Path("dir"), (line,)))
    changed = line.replace("max_model_len", "--max-model-len")
    assert words == f"dir: {changed}; nothing loaded"
    assert (
        of("inspect")
        .line(CheckpointError(Path("dir"), (line,)))
        .endswith(f"{line}; nothing loaded")
    )
