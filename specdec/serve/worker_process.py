"""The process of engine_worker.py, which may begin before it is known what it will run.

It imports for some seconds; meanwhile the one that starts it imports what it needs itself. So this
module imports nothing but the standard library.
"""

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Self

PROGRAM = "from specdec.serve.engine_worker import main; main()"


class WorkerProcess:
    """Waits for an EngineStart. It is in a process group that Ctrl-C does not reach.

    pipe: our end. At the end of a `with` the process has ended.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                process_group=0,
            )
        self.pipe = Connection(ours.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
