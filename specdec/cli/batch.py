"""`specdec batch`: what it refuses before it imports torch."""

from specdec.cli.before_torch import check_models
from specdec.cli.choices import BatchOptions
from specdec.cli.serve import server_options
from specdec.cli.speculation import draft_of


def check_batch(options: BatchOptions) -> None:
    """Refuse what can be known to be wrong before the files are read."""
    server_options(options)
    if options.num_engines is not None and options.ray is None:
        raise ValueError(f"--num-engines {options.num_engines} without a cluster: give --ray too")
    check_models(options.target, draft_of(options.speculation))
