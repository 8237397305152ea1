"""What would the bundled pair cost at a large size? Writes it at that size, same behaviour.

`specdec widen` as a script, for use without an installation.

    python -m scripts.widen_pair /tmp/8b
    python -m scripts.widen_pair /tmp/tiny --shape tiny --dtype float32
"""

import sys

from specdec.cli import main

if __name__ == "__main__":
    main(["widen", *sys.argv[1:]])
