"""Read tokenizer.json with the tokenizers library alone: to import transformers takes much longer.

`FileTokenizer` gives the ids, texts and special tokens that AutoTokenizer (transformers 5.23) gives
for the same files. Where that is not certain, `NotEqual` says why, and transformers reads them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Tokenizer

from specdec.requests.tokenizer_classes import Fields, NotEqual, class_of, known_class

FILE = "tokenizer.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# files and fields with which transformers reads tokenizer.json in another way, or not at all
OTHER_FILES = ("tekken.json", "tokenizer.*.json")
LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
OTHER_FIELDS = (
    *("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "init_inputs"),
    *("model_specific_special_tokens", "gguf_file", "tokenizer_object", "post_processor"),
)

Template = str | dict[str, str] | None
Token = str | AddedToken


class FileTokenizer:
    """Has those attributes of transformers' fast tokenizers that specdec reads.

    named: special tokens by their names. extra: further special tokens.
    """

    def __init__(
        self,
        backend: Tokenizer,
        named: Mapping[str, Token],
        extra: Sequence[Token],
        chat_template: Template,
    ) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = {name: str(token) for name, token in named.items()}
        names = (*self.special_tokens_map.values(), *map(str, extra))
        self.all_special_tokens = list(dict.fromkeys(names))
        self.bos_token = self.special_tokens_map.get("bos_token")
        ids = {name: backend.token_to_id(text) for name, text in self.special_tokens_map.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")
        self.chat_template = chat_template

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self.backend_tokenizer.id_to_token(token) for token in ids]

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are found in a text before it is split, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_chat_template(self, chat_template: str | None, tools: object) -> str:
        """Return Jinja text: the given one, the named one of several, or the checkpoint's own."""
        own = self.chat_template
        if not isinstance(own, dict):
            return cast(str, own if chat_template is None else chat_template)
        if chat_template is not None:
            return own.get(chat_template, chat_template)
        name = "tool_use" if tools is not None and "tool_use" in own else "default"
        if name not in own:
            raise ValueError(f"several chat templates and no default: name one of {sorted(own)}")
        return own[name]


def read_tokenizer_json(directory: Path, config: Fields, model: Fields) -> FileTokenizer:
    """Read a directory's tokenizer. config: tokenizer_config.json; model: config.json.

    NotEqual: transformers could read it in another way.
    """
    _check_files(directory, config, model)
    template = _template(directory, config.get("chat_template"))
    added = _added_tokens(config)
    backend = Tokenizer.from_file(str(directory / FILE))
    kind = class_of(config, model, backend)
    kind.check(backend, config)
    if kind.build is not None and added is not None:
        _check_nothing_is_lost(backend, added)
    named, extra = _special_tokens(config, kind.defaults)
    if backend.padding is not None and "pad_token" not in config:
        raise NotEqual(f"{FILE} pads, with a token that it names there alone")
    backend.no_truncation()
    backend.no_padding()
    _add_tokens(backend, added or {}, named, extra)
    found = FileTokenizer(backend, _in_order(named), extra, template)
    if kind.respells:
        backend.add_tokens([AddedToken(each, special=True) for each in found.all_special_tokens])
    return found


def _check_files(directory: Path, config: Fields, model: Fields) -> None:
    if not (directory / FILE).is_file():
        raise NotEqual(f"there is no {FILE}")
    known_class(config.get("tokenizer_class"))
    if (named := model.get("tokenizer_class")) is not None:
        known_class(named)
    legacy = () if "added_tokens_decoder" in config else LEGACY_FILES
    for pattern in (*OTHER_FILES, *legacy):
        for file in directory.glob(pattern):
            raise NotEqual(f"{file.name} stands beside {FILE}")
    for field in OTHER_FIELDS:
        if field in config:
            raise NotEqual(f"tokenizer_config.json has the field {field}")
    splits, length = config.get("split_special_tokens", False), config.get("model_max_length", 0)
    if splits is not False or not isinstance(length, int | float | None):
        raise NotEqual("split_special_tokens or model_max_length has an unusual value")


def _template(directory: Path, given: object) -> Template:
    """Find the chat template, or several with their names: files count before the config."""
    files = {each.stem: each for each in directory.glob("additional_chat_templates/*.jinja")}
    if (directory / "chat_template.jinja").is_file():
        files = {"default": directory / "chat_template.jinja"} | files
    if files:
        found = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        return found["default"] if set(found) == {"default"} else found
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        given = {each.get("name"): each.get("template") for each in given}
    texts = (*given, *given.values()) if isinstance(given, dict) else (given,)
    if given is not None and not all(isinstance(each, str) for each in texts):
        raise NotEqual("chat_template is neither text nor texts with names")
    return cast(Template, given)


def _special_tokens(
    config: Fields, defaults: Mapping[str, str]
) -> tuple[dict[str, Token], list[Token]]:
    more = config.get("additional_special_tokens") or []
    extra = config.get("extra_special_tokens") or more
    named: dict[str, object] = {**defaults}
    for name, value in config.items():
        if name in NAMED or (name.endswith("_token") and isinstance(value, str | dict)):
            named[name] = value
    if isinstance(extra, dict):
        named |= extra
        extra = more
    if not isinstance(extra, list):
        raise NotEqual("extra_special_tokens is neither a list nor an object")
    found = {name: _token(value) for name, value in named.items() if value is not None}
    return found, [_token(each) for each in extra]


def _token(value: object) -> Token:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return _added({name: each for name, each in value.items() if name != "__type"})
    raise NotEqual(f"{value!r:.60} is no special token")


def _added(fields: dict[str, object]) -> AddedToken:
    try:
        return AddedToken(**fields)  # type: ignore[arg-type]
    except TypeError as error:
        raise NotEqual(f"{fields!r:.60} is no added token") from error


def _added_tokens(config: Fields) -> dict[int, AddedToken] | None:
    """Return added_tokens_decoder in the order of its ids; None: those of tokenizer.json count."""
    given = config.get("added_tokens_decoder")
    if given is None and "added_tokens_decoder" not in config:
        return None
    if not isinstance(given, dict) or not all(
        key.isdecimal() and isinstance(each, dict) for key, each in given.items()
    ):
        raise NotEqual("added_tokens_decoder is no object of tokens by id")
    found = {int(key): _added(dict(each)) for key, each in given.items()}
    return dict(sorted(found.items()))


def _check_nothing_is_lost(backend: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    """Raise NotEqual if a class that makes its vocabulary anew would lose a token."""
    for token, each in backend.get_added_tokens_decoder().items():
        if token not in added or added[token].content != each.content:
            raise NotEqual(f"added_tokens_decoder lacks {each.content!r:.60}, which {FILE} has")


def _add_tokens(
    backend: Tokenizer,
    added: Mapping[int, AddedToken],
    named: Mapping[str, Token],
    extra: Sequence[Token],
) -> None:
    """Add what tokenizer_config.json has beyond tokenizer.json, named tokens as special ones."""
    names = {str(token) for token in named.values()}
    wanted: list[Token] = list(added.values())
    known = {str(each) for each in (*backend.get_added_tokens_decoder().values(), *wanted)}
    for token in (*_in_order(named).values(), *extra):
        if str(token) not in known and token not in wanted:
            wanted.append(token)
    tokens = [AddedToken(each, special=True) if isinstance(each, str) else each for each in wanted]
    for each in tokens:
        each.special = each.special or each.content in names
    backend.add_tokens(tokens)


def _in_order(named: Mapping[str, Token]) -> dict[str, Token]:
    """Put the usual names first, as transformers does."""
    return {name: named[name] for name in (*NAMED, *named) if name in named}
