"""Read a checkpoint's tokenizer, with the ids and texts that transformers gives.

CheckpointError for invalid files. No code of the checkpoint is run: files that name code, or parts
of other models, are refused. transformers is imported only where tokenizer.json is not enough.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.requests.chat_format import MAX_TEMPLATE_BYTES
from specdec.requests.file_tokenizer import read_tokenizer_json
from specdec.requests.tokenizer_classes import NotEqual
from weights.errors import CheckpointError, Problems
from weights.fields import read_json_object
from weights.files.guard import MAX_JSON_BYTES, open_file

logger = logging.getLogger("specdec")
# model types whose tokenizers load others, without passing trust_remote_code on
COMPOSED = ("rag", "encoder-decoder")
MODEL, CONFIG, TOKENIZER = "config.json", "tokenizer_config.json", "tokenizer.json"
OBJECTS = (MODEL, CONFIG, "special_tokens_map.json", "added_tokens.json")  # JSON, all optional
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates/*.jinja"
VOCABULARIES = (
    *(TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model"),
)
# what else the tokenizers of transformers read, beside a vocabulary or in its place
PARTS = (
    *("merges.txt", "bpe.codes", "dict.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("sentencepiece.model", "spm.model", "spm_char.model", "source.spm", "target.spm"),
    *("target_vocab.json", "vocab-src.json", "vocab-tgt.json", "entity_vocab.json", "emoji.json"),
    *("normalizer.json", "byte_maps.json", "word_shape.json", "word_pronunciation.json"),
    "prophetnet.tokenizer",
)
VERSIONS = "tokenizer.*.json"  # for versions of transformers


# of transformers, or a FileTokenizer; and its `decode` without clean-up
ReadTokenizer = tuple[Any, Callable[..., str]]


def read_tokenizer(directory: Path) -> ReadTokenizer:
    """Read tokenizer.json alone where that gives what transformers gives, else with it."""
    objects = _checked(directory)
    try:
        with _refusing(directory):
            found = read_tokenizer_json(directory, objects.get(CONFIG, {}), objects.get(MODEL, {}))
            found.encode("a")  # some defects show at the first use only
    except NotEqual as reason:
        logger.info("%s: transformers reads the tokenizer, since %s", directory, reason)
        return read_with_transformers(directory)
    return found, found.backend_tokenizer.decode


def read_with_transformers(directory: Path) -> ReadTokenizer:
    from specdec.requests import transformers_reader as reader

    objects = _checked(directory)
    problems = Problems(directory)
    for name in (MODEL, CONFIG):
        kind = objects.get(name, {}).get("tokenizer_class")
        if kind is not None and not reader.is_tokenizer(kind):
            what = "is no tokenizer that transformers can load here"
            problems.add(f"{name}: tokenizer_class {kind!r:.60} {what}")
    problems.raise_if_any()
    with _refusing(directory):
        backend = reader.read(directory, objects.get(CONFIG, {}))
        backend.encode("a")
    return backend, reader.plain_decoder(backend)


@contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    """Raise CheckpointError for whatever a reader raises; a panic in tokenizers is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, NotEqual):
        raise
    except BaseException as error:
        raise CheckpointError(directory, _culprits(directory, error)) from error


def vocabulary_name(directory: Path) -> str:
    """Name the file that a tokenizer's ids are from."""
    return next((name for name in VOCABULARIES if (directory / name).is_file()), TOKENIZER)


def _checked(directory: Path) -> dict[str, dict[str, object]]:
    """Read the small files that are present; CheckpointError lists their defects."""
    problems = Problems(directory)
    versions = sorted(file.name for file in directory.glob(VERSIONS))
    names = (*OBJECTS, TEMPLATE, *VOCABULARIES, *PARTS, *versions)
    present = [name for name in names if os.path.lexists(directory / name)]
    if not {*VOCABULARIES}.intersection(present):
        others = ", ".join(VOCABULARIES[1:])
        problems.add(f"{TOKENIZER}: missing, and no other vocabulary that is known: {others}")
    for name in present:
        if not os.path.isfile(directory / name):
            problems.add(f"{name}: not a file that can be read (a directory, or a link to nothing)")
        elif (size := os.path.getsize(directory / name)) > MAX_JSON_BYTES:
            problems.add(f"{name}: {size} bytes, at most {MAX_JSON_BYTES} are read")
    templates = [directory / TEMPLATE] if os.path.isfile(directory / TEMPLATE) else []
    for file in (*templates, *sorted(directory.glob(MORE_TEMPLATES))):
        _check_template(file, problems)
    problems.raise_if_any()
    objects = {
        name: read_json_object(directory / name, problems) for name in OBJECTS if name in present
    }
    for name in (MODEL, CONFIG):
        _check_no_code(name, objects.get(name, {}), problems)
    problems.raise_if_any()
    return objects


def _check_template(file: Path, problems: Problems) -> None:
    stream = open_file(file, problems)
    if stream is None:
        return
    with stream:
        text = stream.read(MAX_TEMPLATE_BYTES + 1)
    if len(text) > MAX_TEMPLATE_BYTES:
        return problems.add(f"{file.name}: more than {MAX_TEMPLATE_BYTES} bytes")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        problems.add(f"{file.name}: not UTF-8 ({error})")


def _check_no_code(name: str, fields: Mapping[str, object], problems: Problems) -> None:
    """Refuse a tokenizer in Python, and one that is made of those of other models."""
    given = fields.get("auto_map")
    code = given.get("AutoTokenizer") if isinstance(given, dict) else given
    if name != CONFIG and not isinstance(given, dict):
        code = None
    if code is not None:
        problems.add(
            f"{name}: auto_map says that the tokenizer is {json.dumps(code):.100}, code of the "
            f"checkpoint, which is never run; convert it to a {TOKENIZER} that needs no code"
        )
    if name == MODEL and fields.get("model_type") in COMPOSED:
        problems.add(f"{name}: model_type {fields['model_type']!r} is not supported")


def _culprits(directory: Path, error: BaseException) -> tuple[str, ...]:
    """Blame the vocabulary if it is no JSON object (slow to find out), else all files present."""
    problems = Problems(directory)
    if (directory / TOKENIZER).is_file():
        read_json_object(directory / TOKENIZER, problems)
    present = [name for name in (*VOCABULARIES, *OBJECTS) if (directory / name).is_file()]
    words = f"{', '.join(present)}: no tokenizer ({type(error).__name__}: {error!s:.300})"
    return tuple(problems.lines) or (words,)
