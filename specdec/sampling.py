"""What a request asks for: how tokens are chosen and where its text ends. Names and defaults are vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from specdec.arguments import refuse_unknown

# values that change nothing, for parameters that do not exist yet: any other value is refused by name
_NOT_YET: dict[str, tuple[object, ...]] = {
    "top_p": (1, 1.0),
    "top_k": (0, -1),
    "min_p": (0, 0.0),
    "seed": (None,),
    "n": (1,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": (None,),
    "bad_words": (None,),
    "allowed_token_ids": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    temperature: float = 1.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class SamplingParams(_Fields):
    """Parameters of one request.

    temperature: 0 = greedy, the only value so far. max_tokens (alias max_new_tokens): most tokens to generate.
    min_tokens: EOS, stop tokens and stop strings cannot end the text before it. stop: strings that end it, cut off
    unless include_stop_str_in_output. stop_token_ids: further ids that end it. ValueError for anything else.
    """

    __slots__ = ()

    def __init__(self, **values: object) -> None:
        names = [field.name for field in fields(_Fields)]
        refuse_unknown("SamplingParams", values, [*names, "max_new_tokens", *_NOT_YET])
        if "max_new_tokens" in values:
            if "max_tokens" in values:
                raise ValueError("SamplingParams: max_new_tokens is another name of max_tokens; give one of them")
            values["max_tokens"] = values.pop("max_new_tokens")
        for name, harmless in _NOT_YET.items():
            if name in values and values.pop(name) not in harmless:
                raise ValueError(f"SamplingParams: {name} is not supported yet; leave it out")
        super().__init__(**values)  # type: ignore[arg-type]
        _check(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _check(params: SamplingParams) -> None:
    if params.temperature != 0:
        raise ValueError(
            f"temperature={params.temperature!r}: only greedy decoding exists so far; give temperature=0.0"
        )
    if not _is_count(params.max_tokens) or params.max_tokens < 1:
        raise ValueError(f"max_tokens={params.max_tokens!r}: give an integer of at least 1")
    if not _is_count(params.min_tokens) or params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens={params.min_tokens!r}: give an integer from 0 to max_tokens={params.max_tokens}")
    if any(not isinstance(text, str) or not text for text in params.stop_strings):
        raise ValueError(f"stop={params.stop!r}: give non-empty strings")
    if any(not _is_count(token) for token in params.stop_token_ids):
        raise ValueError(f"stop_token_ids={params.stop_token_ids!r}: give token ids, integers of at least 0")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
