"""Tokenizers of six families of models, built in code: small vocabularies, real pipelines."""

import json
import random
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

from specdec.requests.tokenizer_classes import WORDS_OF_QWEN2

SPACE = "\u2581"
WORDS_OF_LLAMA3 = WORDS_OF_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
WORDS_OF_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "def f(x):\n    return x + 1\n\nclass A:\n    def __init__(self, name):\n        self.name = 0",
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; they're friends.",
    "Voil\u00e0 l'\u00e9t\u00e9 \u00e0 M\u00fcnchen: 12345 and 3.14159, na\u00efve caf\u00e9s",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \u041f\u0440\u0438\u0432\u0435\u0442",
]
PIECES = [
    *(
        "the",
        " the",
        "The",
        " quick",
        "def f(x):",
        "\n    return",
        " self.name",
        "don't",
        "THEY'RE",
    ),
    *(
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\x00",
        "\u00a0",
        "\u2581",
        "\u3000",
        ".",
        ", ",
    ),
    *(
        "12",
        "34567",
        "3.14",
        "e\u0301",
        "\u00e9",
        "A\u030a",
        "\u212b",
        "\ufb01",
        "\u65e5\u672c\u8a9e",
    ),
    *(
        "\u041f\u0440\u0438",
        "\U0001f642",
        "\U0001f469\u200d\U0001f467",
        "\ufffd",
        "\u0130",
        "\u1e9e",
    ),
    *("<", ">", "|", "<s", "</s", "<|", "|>", "[INST", "<0x41>", "<0xE2>", "_", "-", "a", "b"),
]


def texts(special, count):
    """Texts of which many have special tokens of the family, whole and in parts."""
    draw = random.Random(0)
    pool = PIECES + [each for each in special for _ in range(3)]
    made = ["", *PIECES, *special, *CORPUS]
    while len(made) < count:
        made.append("".join(draw.choices(pool, k=draw.randint(1, 12))))
    return made


@cache
def byte_level_words(pattern):
    """Vocabulary and merges over bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = split_bytes(pattern)
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    return words_of(made)


@cache
def spaced_words():
    """Vocabulary and merges over characters, with a mark for spaces."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre.Metaspace(SPACE)
    made.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=300, min_frequency=1, show_progress=False)
    )
    return words_of(made)


def words_of(made):
    model = json.loads(made.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(each) for each in model["merges"]]


def split_bytes(pattern):
    words = pre.Split(Regex(pattern), "isolated")
    return pre.Sequence([words, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def of_bytes(pattern, **options):
    words, merges = byte_level_words(pattern)
    vocab = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    made.pre_tokenizer = split_bytes(pattern)
    made.decoder = decoders.ByteLevel()
    return made


def of_spaces(**options):
    """Words with marked spaces, single bytes for the rest, as sentencepiece makes them."""
    words, merges = spaced_words()
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: index for index, word in enumerate([*first, *words])}
    flags = {"fuse_unk": True, "byte_fallback": True, **options}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, **flags))
    joined = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(each, special=True) for each in first[:3]])
    made.post_processor = begins_with(made, "<s>")
    return made


def begins_with(made, bos):
    return TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, made.token_to_id(bos))],
    )


def special(*names, **flags):
    return [AddedToken(name, special=True, **flags) for name in names]


def llama2():
    made = of_spaces()
    made.pre_tokenizer = pre.Metaspace(SPACE, prepend_scheme="first", split=False)
    return made, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "legacy": False}


def llama3():
    made = of_bytes(WORDS_OF_LLAMA3, ignore_merges=True)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_0|>"]
    made.add_special_tokens(special(*names))
    begin = begins_with(made, names[0])
    made.post_processor = Sequence([ByteLevel(trim_offsets=False), begin])
    return made, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[0],
        "eos_token": names[2],
        "clean_up_tokenization_spaces": True,
        "model_max_length": 131072,
    }


def qwen2():
    made = of_bytes(WORDS_OF_QWEN2)
    made.normalizer = normalizers.NFC()
    made.post_processor = ByteLevel(trim_offsets=False)
    made.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    made.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return made, {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "split_special_tokens": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }


def mistral():
    made = of_spaces(unk_token="<unk>")
    marked = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    made.normalizer = normalizers.Sequence(marked)
    made.add_special_tokens(special("[INST]", "[/INST]"))
    made.add_tokens([AddedToken("[TOOL]", rstrip=True), "the quick"])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return made, {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, **named}


def gpt2():
    made = of_bytes(WORDS_OF_LLAMA3)
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=True)
    made.post_processor = ByteLevel(trim_offsets=True)
    made.add_special_tokens(special("<|endoftext|>"))
    return made, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}


def granite():
    made = of_bytes(WORDS_OF_O200K)
    made.add_special_tokens(
        special("<|start|>", "<|return|>", "<|call|>", lstrip=True, rstrip=True)
    )
    made.add_tokens(
        [AddedToken("<think>", single_word=True), AddedToken("caf\u00e9", normalized=True)]
    )
    return made, {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": "<|start|>",
        "eos_token": "<|return|>",
        "pad_token": "<|padding|>",  # which tokenizer.json lacks
        "extra_special_tokens": {"image_token": "<|image|>"},
    }


FAMILIES = {
    "llama2": ("llama", llama2),
    "llama3": ("llama", llama3),
    "qwen2": ("qwen2", qwen2),
    "mistral": ("mistral", mistral),
    "gpt2": ("gpt2", gpt2),
    "granite": ("granite", granite),
}


def write_family(name, directory):
    """Write a checkpoint's tokenizer, and of its config the type of model."""
    model_type, build = FAMILIES[name]
    made, config = build()
    directory.mkdir(exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    given = {"chat_template": "{{ messages[0].content }}{{ eos_token }}", **config}
    if name in ("qwen2", "mistral"):  # as earlier versions of transformers saved them
        given["added_tokens_decoder"] = {
            str(token): {
                field: getattr(each, field)
                for field in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
            }
            for token, each in made.get_added_tokens_decoder().items()
        }
    (directory / "tokenizer_config.json").write_text(json.dumps(given))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory
