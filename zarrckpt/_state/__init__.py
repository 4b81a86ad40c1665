"""The user's state and its flat entries in memory: modules, optimizers, sharded tensors. No I/O."""
