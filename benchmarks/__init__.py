"""Compare zarrckpt with its peers and with the machine's limits: ``python -m benchmarks --help``."""
