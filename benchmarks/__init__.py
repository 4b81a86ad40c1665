"""Compare zarrckpt with its peers and with the machine's limits: ``python -m benchmarks --help``."""

import sys
from pathlib import Path

# The S3 server that they measure with is that of the tests.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
