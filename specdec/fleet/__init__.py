"""Many engines on a cluster of Ray: an application for Serve, a stage for Data.

This is the only place that imports ray; each replica and each actor has an engine and the server's
routes.
"""

try:
    import ray  # noqa: F401
except ModuleNotFoundError as error:
    install = 'pip install "specdec[ray]"'
    raise ModuleNotFoundError(f"specdec.fleet needs ray: {install}", name="ray") from error

from specdec.fleet.application import build_app
from specdec.fleet.stage import EngineStage

__all__ = ["EngineStage", "build_app"]
