"""How many tokens per second with K drafts, against plain decoding in the same process?

`specdec bench` as a script, for use without an installation. The last line is JSON.

    OMP_NUM_THREADS=1 python -m scripts.bench --batch 1
    python -m scripts.bench /tmp/8b/target --draft /tmp/8b/eagle3 --suite protocol,rounds
"""

import sys

from specdec.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
