"""The tokenizer of a checkpoint as transformers reads it: CheckpointError for files that hold none, and no code is run.

transformers asks on standard input whether a checkpoint's own code may run. Here no road leads there: the answer is
given (trust_remote_code=False), files that name code are refused, and so is what would load other parts, unasked.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from weights.errors import CheckpointError, Problems
from weights.fields import read_json_object

WHOLE_IN_FILES = (
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
)  # tokenizer classes without code of their own
COMPOSED = (
    "rag",
    "encoder-decoder",
)  # model types whose tokenizers load others, which are not told about code
MODEL, CONFIG, TOKENIZER = "config.json", "tokenizer_config.json", "tokenizer.json"
OBJECTS = (
    MODEL,
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
)  # JSON objects where they are there
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates/*.jinja"
VOCABULARIES = (
    TOKENIZER,
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
)


def read_tokenizer(directory: Path) -> Any:
    """A tokenizer of transformers."""
    fields = _checked(directory)
    try:
        backend = _reader(directory, fields).from_pretrained(directory, trust_remote_code=False)
        backend.encode("a")  # some of what is wrong shows at the first use only
    except (KeyboardInterrupt, SystemExit):
        raise
    except (
        BaseException
    ) as error:  # whatever a wrong value leads to; a panic in tokenizers is not even an Exception
        raise CheckpointError(directory, _culprits(directory, error)) from error
    return backend


def reader_of(directory: Path) -> Any:
    """The class in transformers that reads the files; AutoTokenizer gives the same, but loads every model's code first.

    transformers has its classes loaded when they are first named: 3 s for AutoTokenizer (5.17, H200 machine).
    """
    return _reader(directory, _checked(directory))


def _reader(directory: Path, fields: Mapping[str, object]) -> Any:
    is_whole = fields.get("tokenizer_class") in WHOLE_IN_FILES and "auto_map" not in fields
    if is_whole and (directory / TOKENIZER).is_file():
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def _checked(directory: Path) -> dict[str, object]:
    """tokenizer_config.json, {} where there is none; CheckpointError for what is wrong with any of the small files."""
    problems = Problems(directory)
    present = [
        name for name in (*OBJECTS, TEMPLATE, *VOCABULARIES) if os.path.lexists(directory / name)
    ]
    if not any(name in VOCABULARIES for name in present):
        problems.add(
            f"{TOKENIZER}: missing, and no other vocabulary that is known: {', '.join(VOCABULARIES[1:])}"
        )
    for name in present:
        if not (directory / name).is_file():
            problems.add(f"{name}: not a file that can be read (a directory, or a link to nothing)")
    templates = [directory / TEMPLATE, *sorted(directory.glob(MORE_TEMPLATES))]
    for file in templates:
        _check_text_file(file, problems)
    objects = {
        name: read_json_object(directory / name, problems)
        for name in OBJECTS
        if (directory / name).is_file()
    }
    for name in (MODEL, CONFIG):
        _check_no_code(name, objects.get(name, {}), problems)
    problems.raise_if_any()
    return objects.get(CONFIG, {})


def _check_text_file(file: Path, problems: Problems) -> None:
    if not file.is_file():
        return
    try:
        file.read_bytes().decode()
    except UnicodeDecodeError as error:
        problems.add(f"{file.name}: not UTF-8 ({error})")


def _check_no_code(name: str, fields: Mapping[str, object], problems: Problems) -> None:
    """Refuse a tokenizer in Python, and what loads anything else than a tokenizer of transformers."""
    auto_map = fields.get("auto_map")
    code = (
        auto_map.get("AutoTokenizer")
        if isinstance(auto_map, dict)
        else auto_map
        if name == CONFIG
        else None
    )
    if code is not None:
        problems.add(
            f"{name}: auto_map says that the tokenizer is {json.dumps(code):.100}, code of the checkpoint, which is "
            f"never run; convert it to a {TOKENIZER} that stands by itself"
        )
    kind = fields.get("tokenizer_class")
    if kind is not None and not _is_tokenizer(kind):
        problems.add(
            f"{name}: tokenizer_class {kind!r:.60} is no tokenizer that transformers can load here"
        )
    if name == MODEL and fields.get("model_type") in COMPOSED:
        problems.add(f"{name}: model_type {fields['model_type']!r} is not supported")


def _is_tokenizer(name: object) -> bool:
    """Names that transformers does not know are read as TokenizersBackend; those of other things it would load."""
    if not isinstance(name, str):
        return False
    found = getattr(transformers, name, None) or getattr(
        transformers, name.removesuffix("Fast"), None
    )
    return found is None or (
        isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
    )


def _culprits(directory: Path, error: BaseException) -> tuple[str, ...]:
    """The vocabulary if it is no JSON object, which takes long to find out; else the files that there are."""
    problems = Problems(directory)
    if (directory / TOKENIZER).is_file():
        read_json_object(directory / TOKENIZER, problems)
    present = [name for name in (*VOCABULARIES, *OBJECTS) if (directory / name).is_file()]
    words = f"{', '.join(present)}: no tokenizer ({type(error).__name__}: {error!s:.300})"
    return tuple(problems.lines) or (words,)
