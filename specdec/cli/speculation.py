"""Build the draft that a command was given, and refuse options that need one without it."""

import re
from collections.abc import Mapping

from specdec.arguments import from_mapping
from specdec.described import described
from specdec.speculative_config import SpeculativeConfig


def speculation_of(given: Mapping[str, object]) -> SpeculativeConfig | None:
    """Build the config of the draft. Without a draft, refuse the options that need one."""
    if "model" not in given:
        _refuse_without_draft(given)
        return None
    try:
        return from_mapping(SpeculativeConfig, given)
    except ValueError as error:
        raise ValueError(_renamed(str(error))) from error


def draft_of(speculation: SpeculativeConfig | None) -> str | None:
    """Return the name of the draft, if there is one."""
    return None if speculation is None else str(speculation.model)


def _refuse_without_draft(given: Mapping[str, object]) -> None:
    for each in described(SpeculativeConfig):
        is_count = each.name == "num_speculative_tokens"  # 0 is plain decoding, auto is not
        if each.name in given and given[each.name] != (0 if is_count else each.default):
            value = "" if each.gives is not None else f" {given[each.name]}"
            raise ValueError(f"{each.flag}{value} without a draft: give --draft too")


def _renamed(text: str) -> str:
    """Put the command line's names into an error: --top-k and --revision are other things there."""
    for each in described(SpeculativeConfig):
        if each.flag == f"--draft-{each.name.replace('_', '-')}":
            text = re.sub(rf"\b{each.name}\b", f"draft_{each.name}", text)
    return text
