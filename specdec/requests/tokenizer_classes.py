"""What the tokenizer classes of transformers make of a tokenizer.json, for those that models use.

Two classes take the file as it is. The others build normalizer, pre-tokenizer and decoder in code
of their own: where these equal the file's, the class adds nothing, and the file can be read alone.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS_OF_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "\u2581"
END = "<|endoftext|>"
FLAGS = (
    *("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)
Fields = Mapping[str, object]


class NotEqual(Exception):
    """Says why a tokenizer.json is left to transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerClass:
    """Says what a class does. build: makes its own pipeline, None: it takes the file's.

    defaults: special tokens where the config names none. respells: it adds all special tokens once
    more, without flags of their own.
    """

    build: Callable[[Fields], Tokenizer] | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)
    respells: bool = False

    def check(self, backend: Tokenizer, config: Fields) -> None:
        """Raise NotEqual if the class would build something else than the file says."""
        if self.build is None:
            return
        theirs, ours = _pipeline(backend), _pipeline(self.build(config))
        differing = [name for name in ours if ours[name] != theirs[name]]
        if differing:
            raise NotEqual(f"its class would replace its {', '.join(differing)}")


def class_of(config: Fields, model: Fields, backend: Tokenizer) -> TokenizerClass:
    """Return the class that AutoTokenizer would take; NotEqual for one that is unknown here."""
    kind = known_class(config.get("tokenizer_class"))
    is_byte_level = "ByteLevel" in str(_state(backend.decoder))
    overrules = model.get("model_type") == "mistral" or (kind is LLAMA and is_byte_level)
    return AS_IS if overrules else kind


def known_class(name: object) -> TokenizerClass:
    """Look a class up by its name, NotEqual if it has no row."""
    found = CLASSES.get(name.removesuffix("Fast")) if isinstance(name, str) else None
    if found is None:
        raise NotEqual(f"tokenizer_class is {name!r:.60}")
    return found


def _llama(config: Fields) -> Tokenizer:
    spaced = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if spaced else "never"
    made = Tokenizer(models.BPE(fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    joined = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    made.decoder = decoders.Sequence(joined)
    return made


def _gpt2(config: Fields, use_regex: bool = True) -> Tokenizer:
    made = Tokenizer(models.BPE())
    spaced = bool(config.get("add_prefix_space"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=use_regex)
    made.decoder = decoders.ByteLevel()
    return made


def _qwen2(config: Fields) -> Tokenizer:
    made = _gpt2(config, use_regex=False)
    made.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(WORDS_OF_QWEN2), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, made.pre_tokenizer])
    return made


def _pipeline(backend: Tokenizer) -> dict[str, object]:
    """Describe all of a tokenizer but its vocabulary and its post-processor, which classes keep."""
    model = backend.model
    found = {name: getattr(model, name, None) or None for name in FLAGS}
    if found["byte_fallback"] and all(
        backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
    ):
        found["unk_token"] = None  # no text needs it
    return {
        "normalizer": _state(backend.normalizer),
        "pre_tokenizer": _state(backend.pre_tokenizer),
        "decoder": _state(backend.decoder),
        "model": (type(model).__name__, found),
    }


def _state(part: Any) -> object:
    """Return a part as in tokenizer.json, without the fields that change no id and no text."""
    if part is None:
        return None
    # a decoder reads none of them, a pre-tokenizer all but trim_offsets
    is_decoder = isinstance(part, decoders.Decoder)
    unread = {"trim_offsets", *(("add_prefix_space", "use_regex") if is_decoder else ())}

    def kept(fields: dict[str, object]) -> dict[str, object]:
        left_out = unread if fields.get("type") == "ByteLevel" else ()
        return {name: each for name, each in fields.items() if name not in left_out}

    return json.loads(part.__getstate__(), object_hook=kept)


AS_IS = TokenizerClass()
LLAMA = TokenizerClass(
    build=_llama, defaults={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
)
# names without "Fast", which AutoTokenizer drops too
CLASSES = {
    "TokenizersBackend": AS_IS,
    "PreTrainedTokenizer": AS_IS,
    "LlamaTokenizer": LLAMA,
    "Qwen2Tokenizer": TokenizerClass(
        build=_qwen2,
        defaults=dict.fromkeys(("unk_token", "eos_token", "pad_token"), END),
        respells=True,
    ),
    "GPT2Tokenizer": TokenizerClass(
        build=_gpt2, defaults=dict.fromkeys(("unk_token", "bos_token", "eos_token"), END)
    ),
}
