"""`specdec batch --ray`: let engines on a cluster of Ray answer the lines of a file."""

import sys
from contextlib import closing

from specdec.cli.batch_file import Batch
from specdec.cli.batch_here import run_batch
from specdec.cli.choices import BatchOptions
from specdec.fleet.batch_job import answer_lines, connected, num_gpus
from specdec.fleet.engine_args import EngineArgs
from specdec.serve.http.batch import answer_problem


def run_batch_on_ray(options: BatchOptions) -> None:
    """Look at both files, answer what is left on the cluster at --ray."""
    run_batch(options, _answer_on_ray)


def _answer_on_ray(options: BatchOptions, batch: Batch) -> None:
    args = EngineArgs(
        model=options.target,
        speculative_config=options.speculation,
        engine=options.engine,
        server=options.server,
    )
    assert options.ray is not None
    with connected(options.ray):
        num_engines = options.num_engines or (num_gpus() if args.num_gpus else 1)
        if num_engines == 0:
            raise ValueError(f"--ray {options.ray}: no GPU there: give --device cpu")
        print(f"{num_engines} engines on {options.ray}", file=sys.stderr)
        good = [line for line in batch.lines() if line.problem is None]
        with closing(answer_lines(good, args, num_engines)) as answers, batch.writing():
            for line in batch.lines():
                batch.write(next(answers) if line.problem is None else answer_problem(line))
