"""Every field that a request may have: it works, changes nothing here, or is refused by name.

A field that is null counts as absent. One table, so that no field is ignored by accident.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.serve.http.errors import ApiError

CHAT, COMPLETION, TOKENIZE, DETOKENIZE = "chat", "completion", "tokenize", "detokenize"
TEXT = (CHAT, COMPLETION)
NO_SUCH = "is not supported by this engine"


@dataclass(frozen=True, slots=True)
class Field:
    """refused: why, for a field whose effect is missing. neutral: values that ask for no effect."""

    kinds: tuple[str, ...]
    is_harmless: bool = False
    refused: str | None = None
    neutral: tuple[object, ...] = ()


def _works(kinds: tuple[str, ...], *names: str) -> dict[str, Field]:
    return {name: Field(kinds) for name in names}


def _harmless(*names: str) -> dict[str, Field]:
    return {name: Field(TEXT, is_harmless=True) for name in names}


def _refused(reason: str, **names: tuple[object, ...]) -> dict[str, Field]:
    return {name: Field(TEXT, refused=reason, neutral=values) for name, values in names.items()}


FIELDS: dict[str, Field] = {
    **_works((*TEXT, TOKENIZE, DETOKENIZE), "model"),
    **_works((CHAT, TOKENIZE), "messages", "add_generation_prompt", "continue_final_message"),
    **_works((CHAT, TOKENIZE), "chat_template", "chat_template_kwargs"),
    **_works((COMPLETION, TOKENIZE), "prompt"),
    **_works((*TEXT, TOKENIZE), "add_special_tokens"),
    **_works((TOKENIZE,), "parse_special", "return_token_strs"),
    **_works((DETOKENIZE,), "tokens"),
    **_works((CHAT, TOKENIZE), "tools"),
    **_works((CHAT,), "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    **_works((CHAT,), "max_completion_tokens", "top_logprobs", "documents"),
    **_works((COMPLETION,), "echo"),
    **_works(TEXT, "max_tokens", "n", "stream", "stream_options", "seed", "stop", "logprobs"),
    **_works(TEXT, "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    **_works(TEXT, "bad_words", "allowed_token_ids"),
    **_works(TEXT, "presence_penalty", "frequency_penalty", "repetition_penalty"),
    **_works(TEXT, "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
    **_works(TEXT, "skip_special_tokens", "return_token_ids", "priority"),
    **_works(TEXT, "speculate", "num_speculative_tokens", "show_drafts"),
    **_works(TEXT, "response_format", "structured_outputs"),
    **_works(TEXT, "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    **_harmless("store", "metadata", "user", "service_tier"),
    **_harmless("prompt_cache_key", "prompt_cache_retention", "cache_control"),
    **_harmless("safety_identifier", "prediction"),
    **_refused("is not supported: use tools", functions=([],), function_call=("none",)),
    **_refused(NO_SUCH, web_search_options=()),
    **_refused("is not supported: text alone is written", modalities=(["text"],), audio=()),
    **_refused("is not supported: leave it out", verbosity=("medium",), suffix=("",)),
    **_refused("is not supported: give n alone", best_of=(1,)),
    **_refused(NO_SUCH, use_beam_search=(False,), length_penalty=(1, 1.0), cache_salt=()),
    **_refused(NO_SUCH, truncate_prompt_tokens=(), logits_processors=(), mm_processor_kwargs=()),
    **_refused(NO_SUCH, kv_transfer_params=()),
    **_refused("is not supported: use echo with logprobs", prompt_logprobs=()),
    **_refused("is not taken from a body: give the header X-Request-Id", request_id=()),
}


def known_fields(
    kind: str, body: Mapping[str, object], ignore_unknown: bool = False
) -> dict[str, object]:
    """The fields that have an effect. ApiError names one that is refused or unknown."""
    found = {}
    for name, value in body.items():
        field = FIELDS.get(name)
        if field is None or kind not in field.kinds:
            if not ignore_unknown:
                raise ApiError(400, _unknown(kind, name), name)
        elif value is None or field.is_harmless:
            continue
        elif field.refused is None:
            found[name] = value
        elif value not in field.neutral:
            raise ApiError(400, f"{name} {field.refused}", name)
    return found


def _unknown(kind: str, name: str) -> str:
    allowed = [each for each, field in FIELDS.items() if kind in field.kinds]
    close = difflib.get_close_matches(name[:100], allowed, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown field {name!r:.100}{hint}"
