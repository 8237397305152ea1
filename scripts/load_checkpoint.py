"""Does a checkpoint load, as what, and how long does it take?

`specdec load` as a script, for use without an installation, as `python -m specdec` is for every
command. `specdec inspect` answers the first part without loading.

    python -m scripts.load_checkpoint demo demo/eagle1
    python -m scripts.load_checkpoint ~/Llama-3.1-8B-Instruct ~/EAGLE3-LLaMA3.1-8B --dtype bfloat16
"""

import sys

from specdec.cli import main

if __name__ == "__main__":
    main(["load", *sys.argv[1:]])
