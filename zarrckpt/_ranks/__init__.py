"""Communication between ranks: messages, pieces of data, and the detection of failed and lost ranks.

This package handles processes, connections and errors. It does not depend on checkpoints, object stores, tensors or
plans. Callers encode the contents of messages with ``_format.wire``.
"""
