"""Convert checkpoints to files of other libraries, and such files to checkpoints."""
