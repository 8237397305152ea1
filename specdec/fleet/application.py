"""The server's application as a deployment of Ray Serve: one engine a replica.

    serve.run(build_app({"model": "demo", "speculative_config": {"model": "demo"}}))

What the application checks (the Host, the key, codings, health checks) holds here too. The size of
heads, URLs and trailers, deadlines, the number of connections and the framing of answers are those
of Ray's proxy, not of serve/http/connection.py: open it to others through a load balancer only.

Plain Serve, since the request types of Ray Serve LLM, and with them its router by prefix, need
another engine's package.
"""

import inspect
from collections.abc import Mapping
from typing import cast

from ray import serve
from starlette.applications import Starlette

from specdec.arguments import refuse_unknown
from specdec.config import EngineConfig
from specdec.fleet.engine_args import EngineArgs
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
    deployment: arguments of serve.deployment. By default a replica has a GPU unless device is
    "cpu", and holds twice as many requests as its engine runs together; others wait in Ray.
    There is one replica; autoscaling_config={"max_replicas": N} adds others when more requests
    are there than engines run together.
    ValueError for what cannot be.
    """
    refuse_unknown("build_app", args, NAMES | set(EngineConfig.__dataclass_fields__), ENGINE)
    if not isinstance(args.get("model"), str):
        raise ValueError(f"model={args.get('model')!r}: give a directory, a hub id, or demo")
    engine = {name: args[name] for name in args if name not in NAMES}
    engine_args = EngineArgs(
        model=str(args["model"]),
        speculative_config=_mapping(args, "speculative_config") or None,
        engine=cast(EngineOptions, engine),
        server=_mapping(args, "server"),
    )
    options = _deployment(engine_args, _mapping(args, "deployment"))
    return serve.deployment(EngineReplica, **options).bind(engine_args)


def _mapping(args: Mapping[str, object], name: str) -> dict[str, object]:
    value = args.get(name)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{name}={value!r}: give a dict")
    return dict(value or {})


def _deployment(args: EngineArgs, given: dict[str, object]) -> dict[str, object]:
    """Return the arguments of serve.deployment."""
    refuse_unknown("deployment", given, DEPLOYMENT)
    actor = {"num_gpus": args.num_gpus, **_mapping(given, "ray_actor_options")}
    options: dict[str, object] = {
        "name": "specdec",
        "max_ongoing_requests": 2 * args.max_num_seqs,
        **given,
        "ray_actor_options": actor,
    }
    if "num_replicas" not in given:
        scaling = _mapping(given, "autoscaling_config")
        options["autoscaling_config"] = {"target_ongoing_requests": args.max_num_seqs, **scaling}
    return options
