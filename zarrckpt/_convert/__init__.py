"""Other libraries' files from checkpoints, and checkpoints from such files."""
