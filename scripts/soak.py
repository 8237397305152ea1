"""Does any request's output depend on the others, even if the cache is too small for all of them?

Requests with any parameters arrive between steps, are aborted, and lose their blocks to each other,
in engines whose sizes differ; each must give what it gives alone (tests/soak.py says how). Prints
the faults and counts; exit code 1 if there are faults.

    python -m scripts.soak                              # 300 requests, 3 minutes on one CPU core
    python -m scripts.soak --num-requests 40 --seed 7
    python -m scripts.soak --device cuda                # graphs, and the checkpoint's own dtype
    python -m scripts.soak --adaptive                   # rows shared out, drafts vary (not checked)
    python -m scripts.soak --trees                      # trees of any shape (drafts unchecked)
    python -m scripts.soak --adaptive --trees           # chains and trees in turn
"""

import argparse
import json
import sys

from tests.soak import soak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--adaptive", action="store_true", help="share rows out, levels vary")
    parser.add_argument("--trees", action="store_true", help="draft trees of any shape")
    args = parser.parse_args()
    result = soak(args.num_requests, args.seed, args.device, args.adaptive, args.trees)
    print("\n".join(result["faults"]) or "no faults")
    print(json.dumps(result))
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
