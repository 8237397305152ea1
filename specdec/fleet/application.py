"""The server's application as a deployment of Ray Serve: one engine a replica.

    serve.run(build_app({"model": "demo", "speculative_config": {"model": "demo"}}))

What the application checks (the Host, the key, codings, health checks) holds here too. The size of
heads, URLs and trailers, deadlines, the number of connections and the framing of answers are those
of Ray's proxy, not of serve/http/connection.py: open it to others through a load balancer only.
"""

import inspect
from collections.abc import Mapping
from typing import cast

from ray import serve
from starlette.applications import Starlette

from specdec.arguments import refuse_unknown
from specdec.config import EngineConfig
from specdec.fleet.stage import EngineArgs
from specdec.from_vllm import ENGINE
from specdec.options import EngineOptions

NAMES = {"model", "speculative_config", "server", "deployment"}
DEPLOYMENT = set(inspect.signature(serve.deployment).parameters) - {"_func_or_class"}


@serve.ingress()
class EngineReplica:
    """Serves the routes of `specdec serve` from one engine."""

    def __init__(self, args: EngineArgs) -> None:
        self._llm, application = args.start()
        self._app = application.app

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._app

    def check_health(self) -> None:
        """Fail if the engine has: Ray then replaces the replica."""
        if not self._llm.is_well:
            raise RuntimeError("the engine has failed, was shut down or makes no progress")


def build_app(args: dict[str, object]) -> serve.Application:
    """Make an application for `serve.run`, `serve run` and Serve's configuration files.

    args: the arguments of AsyncLLM (model, speculative_config, max_num_seqs, ...), and
    server: fields of ServerOptions. max_waiting counts in each replica.
    deployment: arguments of serve.deployment. By default a replica has tensor_parallel_size GPUs,
    none if device is "cpu", and holds twice as many requests as its engine runs together; others
    wait in Ray. There is one replica; autoscaling_config={"max_replicas": N} adds others when more
    requests are there than engines run together.
    ValueError for what cannot be.
    """
    refuse_unknown("build_app", args, NAMES | set(EngineConfig.__dataclass_fields__), ENGINE)
    engine_args = EngineArgs(
        cast(str, args.get("model")),
        _mapping(args, "speculative_config") or None,
        cast(EngineOptions, {name: args[name] for name in args if name not in NAMES}),
        _mapping(args, "server"),
    )
    options = _deployment(engine_args, _mapping(args, "deployment"))
    return serve.deployment(EngineReplica, **options).bind(engine_args)


def _mapping(args: Mapping[str, object], name: str) -> dict[str, object]:
    value = args.get(name)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{name}={value!r}: give a dict")
    return dict(value or {})


def _deployment(args: EngineArgs, given: dict[str, object]) -> dict[str, object]:
    refuse_unknown("deployment", given, DEPLOYMENT)
    actor = {"num_gpus": args.num_gpus, **_mapping(given, "ray_actor_options")}
    most = EngineConfig(**args.engine).max_num_seqs
    options: dict[str, object] = {"name": "specdec", "max_ongoing_requests": 2 * most, **given}
    if "num_replicas" not in given:
        scaling = _mapping(given, "autoscaling_config")
        options["autoscaling_config"] = {"target_ongoing_requests": most, **scaling}
    return {**options, "ray_actor_options": actor}
