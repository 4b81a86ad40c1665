"""Who writes what: from what all ranks hold to the grid, the owner and the pieces of every chunk.

Integers and names only: no torch, no I/O, nothing of other ranks but their descriptions. Every rank computes the same.
"""
