"""A cluster of Ray in this machine, with two processors: -m fleet, with the extra test-fleet."""

import os
import secrets
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

INSTALL = 'ray is missing: pip install -c constraints.txt -e ".[test-fleet]"'


@pytest.fixture(scope="session", autouse=True)
def _ray_is_installed() -> None:
    """A missing Ray is a failure: these tests run only where they are asked for."""
    if find_spec("ray") is None:
        pytest.fail(INSTALL)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. The key that Ray wants is the tests' own; it would write one to the home."""
    key = tmp_path_factory.mktemp("ray") / "key"
    key.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(key)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
