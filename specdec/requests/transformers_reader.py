"""Read a tokenizer with transformers, whose import takes long.

tokenizer_files.py imports this file where tokenizer.json is not enough, and for a caller who wants
a tokenizer of transformers.

No code of the checkpoint is run, and transformers never asks on standard input whether it may:
trust_remote_code is False.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import transformers

# tokenizer classes without code of their own
WHOLE_IN_FILES = ("TokenizersBackend", "PreTrainedTokenizerFast")


def read(directory: Path, fields: Mapping[str, object]) -> Any:
    """Read files that were checked. fields: tokenizer_config.json."""
    return reader_of(directory, fields).from_pretrained(directory, trust_remote_code=False)


def reader_of(directory: Path, fields: Mapping[str, object]) -> Any:
    """Return the class in transformers that reads the files.

    AutoTokenizer would find the same one, but naming it imports every model's code first, which
    takes 3 s (transformers 5.17, H200 machine).
    """
    is_whole = fields.get("tokenizer_class") in WHOLE_IN_FILES and "auto_map" not in fields
    if is_whole and (directory / "tokenizer.json").is_file():
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def is_tokenizer(name: object) -> bool:
    """Say whether a class is a tokenizer of transformers.

    True for names unknown to transformers too, which it reads as TokenizersBackend.
    """
    if not isinstance(name, str):
        return False
    others = getattr(transformers, name.removesuffix("Fast"), None)
    found = getattr(transformers, name, others)
    base = transformers.PreTrainedTokenizerBase
    return found is None or (isinstance(found, type) and issubclass(found, base))


def plain_decoder(backend: Any) -> Callable[..., str]:
    """Return `decode` of a tokenizer, without clean-up.

    It is that of tokenizers where transformers only calls it, in five times its time; every token
    of every request is decoded twice.
    """
    base = transformers.PreTrainedTokenizerFast
    if (kind := type(backend)).decode is base.decode and kind._decode is base._decode:
        return cast(Callable[..., str], backend.backend_tokenizer.decode)
    return partial(backend.decode, clean_up_tokenization_spaces=False)
