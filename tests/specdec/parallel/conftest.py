"""Ranks that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.specdec.parallel.rank_processes import RankProcesses, rank_processes


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankProcesses]:
    with rank_processes(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankProcesses]:
    with rank_processes(4) as ranks:
        yield ranks


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> RankProcesses:
    """Two ranks, or four where slow tests run."""
    found: RankProcesses = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])
    return found
