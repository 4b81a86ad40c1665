"""Save and load with ``torch.distributed.checkpoint`` (DCP). Only this package uses DCP's classes."""
