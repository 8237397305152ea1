"""`specdec serve`: take the address and start the engine's process before torch is imported."""

from specdec.cli.before_torch import server_options
from specdec.cli.choices import ServeOptions
from specdec.serve.http.options import listen
from specdec.serve.worker_process import WorkerProcess


def run_serve(options: ServeOptions) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    server = server_options(options)
    # the worker imports for seconds, and so does this process
    with listen(server.host, options.port) as address, WorkerProcess() as worker:
        from specdec.cli.server import run_server

        run_server(options, server, address, worker)
