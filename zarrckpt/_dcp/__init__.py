"""The side door: ``torch.distributed.checkpoint`` (DCP) saves and loads through the steps of this package.

The only room that knows DCP's classes.
"""
