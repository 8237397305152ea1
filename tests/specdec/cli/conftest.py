"""The command `specdec` in this process."""

from collections.abc import Callable

import pytest

from specdec.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run("generate", ...): the exit code, stdout and stderr of a command."""

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(args)
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call
