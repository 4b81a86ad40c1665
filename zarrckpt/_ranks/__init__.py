"""The room where ranks talk: what one rank tells the others, and how all of them learn that one failed or is gone.

It knows processes, connections and errors. It may not know checkpoints, stores of objects, tensors or plans: what goes
through its rounds is the caller's, encoded by ``_format.wire``.
"""
