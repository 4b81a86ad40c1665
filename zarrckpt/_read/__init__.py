"""A committed checkpoint, read: its root, its chunks, its arrays. No torch."""
