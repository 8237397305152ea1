"""Lists of equal length from one thing or several, as a caller gave them. ValueError names it."""

from collections.abc import Mapping, Sequence
from typing import cast

from specdec.arguments import as_list, is_integer, plain
from specdec.requests.chat_format import Conversation
from specdec.requests.intake import Prompt, from_array
from specdec.requests.params import SamplingParams


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Wrap a single prompt; integers are its token ids. Intake checks what each prompt holds."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    wanted = "text, a list of token ids, or a list of these"
    given = from_array(prompts)
    items = as_list("prompts", given if isinstance(given, list) else prompts, wanted)
    if items and all(map(is_integer, items)):
        return [cast(list[int], items)]
    batch: list[Prompt] = []
    for index, item in enumerate(map(from_array, items)):
        if isinstance(item, int) or not isinstance(item, str | Sequence | Mapping):
            raise ValueError(f"prompts[{index}] is {item!r}: give text or a list of token ids")
        batch.append(cast(Prompt, item))
    return batch


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Wrap a single conversation (a list of lists is several); each is checked when encoded."""
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
        return list(cast(Sequence[Conversation], messages))
    return [cast(Conversation, messages)]


def as_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Give each prompt its parameters, which are checked with its request."""
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    params = as_list("sampling_params", sampling_params, "SamplingParams, or a list of them")
    if len(params) != count:
        raise ValueError(
            f"{len(params)} sampling_params for {count} prompts: give one, or one for each"
        )
    return cast(list[SamplingParams], params)


def as_priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    """Give each prompt its priority; 0 if none is given."""
    if priority is None:
        return [0] * count
    wanted = f"a list of {count} integers, one for each prompt, or None"
    priorities = as_list("priority", priority, wanted)
    if len(priorities) != count or not all(map(is_integer, priorities)):
        raise ValueError(f"priority={priority!r}: give {wanted}")
    return cast(list[int], plain(priorities))


def refuse_lora(lora_request: object) -> None:
    """Refuse anything but None, by ValueError."""
    if lora_request is not None:
        advice = "LoRA is not supported; merge the adapter into the target's weights"
        raise ValueError(f"lora_request={lora_request!r}: {advice}")
