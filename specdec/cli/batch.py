"""`specdec batch`: its options, and what it refuses before it imports torch."""

from dataclasses import dataclass
from pathlib import Path

from specdec.cli.before_torch import check_models
from specdec.cli.generate import DraftOptions, speculation_of
from specdec.cli.options import check_choice
from specdec.cli.serve import GENERATION_CONFIGS
from specdec.requests.chat_format import ChatFormat
from specdec.requests.chat_template import check_template


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(DraftOptions):
    """Holds the command's options; see ServerOptions. ray: a cluster's address."""

    input: Path
    output: Path
    served_model_names: list[str] | None
    chat_template: str | None
    generation_config: str
    ignore_unknown: bool
    ray: str | None
    num_engines: int | None


def check_batch(options: BatchOptions) -> None:
    """Refuse what can be known to be wrong before the files are read."""
    check_choice("--generation-config", options.generation_config, GENERATION_CONFIGS)
    ChatFormat(chat_template=options.chat_template)
    check_template(options.chat_template)
    if options.num_engines is not None and options.ray is None:
        raise ValueError(f"--num-engines {options.num_engines} without a cluster: give --ray too")
    speculation_of(options)
    check_models(options.target, options.draft, options.engine)
