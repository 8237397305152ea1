"""The bytes of single tokens, some of which are only a part of a character.

Decoding one token alone gives U+FFFD for such a part, and drops the space that begins a word in
tokenizers like sentencepiece. So its name in the vocabulary goes through the tokenizer's decoder
step by step, in bytes.
"""

import json
import re
from collections.abc import Callable
from typing import Any

Step = Callable[[bytes], bytes]

HEX = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


def decoding_steps(fast: Any) -> list[Step] | None:
    """Return what a tokenizer's decoder does to a name, in steps; None where that is unknown."""
    if fast is None or fast.decoder is None:
        return None
    form = json.loads(fast.decoder.__getstate__())
    steps = [_step(each) for each in form.get("decoders", [form])]
    return None if None in steps else [step for step in steps if step is not None]


def _step(form: dict[str, Any]) -> Step | None:
    match form:
        case {"type": "ByteLevel"}:
            return _from_byte_level
        case {"type": "ByteFallback"}:
            return _from_hex
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return lambda name: name.replace(old.encode(), new.encode())
        case {"type": "Metaspace", "replacement": str(sign)}:
            return lambda name: name.replace(sign.encode(), b" ")
        case {"type": "Fuse" | "Strip"}:  # they change whole texts only
            return lambda name: name
    return None


def _from_byte_level(name: bytes) -> bytes:
    """Map each character to a byte; a name with others stands for itself, as in tokenizers."""
    text = name.decode("utf-8", "replace")
    return bytes(BYTES[char] for char in text) if BYTES.keys() >= set(text) else name


def _from_hex(name: bytes) -> bytes:
    found = HEX.fullmatch(name)
    return name if found is None else bytes.fromhex(found[1].decode())


def _byte_level() -> dict[str, int]:
    """List GPT-2's characters for bytes: printable ones stay, the others follow 255 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTES = _byte_level()
