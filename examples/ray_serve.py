"""Two engines behind one address, on Ray Serve: starts them, asks once, and serves until Ctrl-C.

pip install "specdec[ray]"
python examples/ray_serve.py
python examples/ray_serve.py --target DIR --draft DIR --device cuda --replicas 8

It uses the running cluster that RAY_ADDRESS names, or starts one on this machine.
"""

import argparse
import os
import signal

import ray
from openai import OpenAI
from ray import serve

from specdec.fleet import build_app

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--once", action="store_true", help="ask once and end")
    args = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": args.port})
    app = build_app(
        {
            "model": args.target,
            "speculative_config": {"model": args.draft, "num_speculative_tokens": 3},
            "device": args.device,
            "deployment": {"num_replicas": args.replicas},
        }
    )
    serve.run(app)
    url = f"http://127.0.0.1:{args.port}/v1"
    # a replica that dies fails its requests: the client asks again, and a seed gives the same text
    client = OpenAI(base_url=url, api_key="none", max_retries=4)
    ask = {"model": args.target, "prompt": "def add(a, b):", "max_tokens": 32, "seed": 1}
    print(client.completions.create(**ask).choices[0].text)
    print(f"{args.replicas} engines at {url}")
    if not args.once:
        print("Ctrl-C stops")
        signal.sigwait([signal.SIGINT])
    serve.shutdown()


if __name__ == "__main__":
    main()
