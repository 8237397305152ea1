"""A checkpoint's tokenizer as transformers reads it. CheckpointError for invalid files.

No code of the checkpoint is run, and transformers never asks on standard input whether it may:
trust_remote_code is False, and files that name code, or parts of other models, are refused.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import transformers

from specdec.requests.chat_format import MAX_TEMPLATE_BYTES
from weights.errors import CheckpointError, Problems
from weights.fields import read_json_object
from weights.files.guard import MAX_JSON_BYTES, open_file

# tokenizer classes without code of their own
WHOLE_IN_FILES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# model types whose tokenizers load others, without passing trust_remote_code on
COMPOSED = ("rag", "encoder-decoder")
MODEL, CONFIG, TOKENIZER = "config.json", "tokenizer_config.json", "tokenizer.json"
OBJECTS = (MODEL, CONFIG, "special_tokens_map.json", "added_tokens.json")  # JSON, all optional
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates/*.jinja"
VOCABULARIES = (
    TOKENIZER,
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
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


def read_tokenizer(directory: Path) -> Any:
    """A tokenizer of transformers."""
    reader = reader_of(directory)
    try:
        backend = reader.from_pretrained(directory, trust_remote_code=False)
        backend.encode("a")  # some defects show at the first use only
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in tokenizers is not even an Exception
        raise CheckpointError(directory, _culprits(directory, error)) from error
    return backend


def plain_decoder(backend: Any) -> Callable[..., str]:
    """`decode` of a tokenizer, without clean-up.

    The one of tokenizers where transformers only calls it, in five times its time; every token of
    every request is decoded twice.
    """
    base = transformers.PreTrainedTokenizerFast
    if (kind := type(backend)).decode is base.decode and kind._decode is base._decode:
        return cast(Callable[..., str], backend.backend_tokenizer.decode)
    return partial(backend.decode, clean_up_tokenization_spaces=False)


def reader_of(directory: Path) -> Any:
    """The class in transformers that reads the files.

    AutoTokenizer would find the same one, but naming it imports every model's code first, which
    takes 3 s (transformers 5.17, H200 machine).
    """
    fields = _checked(directory)
    is_whole = fields.get("tokenizer_class") in WHOLE_IN_FILES and "auto_map" not in fields
    if is_whole and (directory / TOKENIZER).is_file():
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def vocabulary_name(directory: Path) -> str:
    """The file that a tokenizer's ids are from."""
    return next((name for name in VOCABULARIES if (directory / name).is_file()), TOKENIZER)


def _checked(directory: Path) -> dict[str, object]:
    """tokenizer_config.json, {} if there is none; CheckpointError lists defects of small files."""
    problems = Problems(directory)
    versions = sorted(file.name for file in directory.glob(VERSIONS))
    names = (*OBJECTS, TEMPLATE, *VOCABULARIES, *PARTS, *versions)
    present = [name for name in names if os.path.lexists(directory / name)]
    if not any(name in VOCABULARIES for name in present):
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
    return objects.get(CONFIG, {})


def _check_template(file: Path, problems: Problems) -> None:
    stream = open_file(file, problems)
    if stream is None:
        return
    with stream:
        text = stream.read(MAX_TEMPLATE_BYTES + 1)
    if len(text) > MAX_TEMPLATE_BYTES:
        problems.add(f"{file.name}: more than {MAX_TEMPLATE_BYTES} bytes")
        return
    try:
        text.decode()
    except UnicodeDecodeError as error:
        problems.add(f"{file.name}: not UTF-8 ({error})")


def _check_no_code(name: str, fields: Mapping[str, object], problems: Problems) -> None:
    """Refuse a tokenizer in Python, and anything that is not a tokenizer of transformers."""
    code = fields.get("auto_map")
    if isinstance(code, dict):
        code = code.get("AutoTokenizer")
    elif name != CONFIG:
        code = None
    if code is not None:
        problems.add(
            f"{name}: auto_map says that the tokenizer is {json.dumps(code):.100}, code of the "
            f"checkpoint, which is never run; convert it to a {TOKENIZER} that needs no code"
        )
    kind = fields.get("tokenizer_class")
    if kind is not None and not _is_tokenizer(kind):
        what = "is no tokenizer that transformers can load here"
        problems.add(f"{name}: tokenizer_class {kind!r:.60} {what}")
    if name == MODEL and fields.get("model_type") in COMPOSED:
        problems.add(f"{name}: model_type {fields['model_type']!r} is not supported")


def _is_tokenizer(name: object) -> bool:
    """True for names unknown to transformers too, which it reads as TokenizersBackend."""
    if not isinstance(name, str):
        return False
    found = getattr(transformers, name, None)
    if found is None:
        found = getattr(transformers, name.removesuffix("Fast"), None)
    base = transformers.PreTrainedTokenizerBase
    return found is None or (isinstance(found, type) and issubclass(found, base))


def _culprits(directory: Path, error: BaseException) -> tuple[str, ...]:
    """The vocabulary if it is no JSON object (slow to find out), else all files present."""
    problems = Problems(directory)
    if (directory / TOKENIZER).is_file():
        read_json_object(directory / TOKENIZER, problems)
    present = [name for name in (*VOCABULARIES, *OBJECTS) if (directory / name).is_file()]
    words = f"{', '.join(present)}: no tokenizer ({type(error).__name__}: {error!s:.300})"
    return tuple(problems.lines) or (words,)
