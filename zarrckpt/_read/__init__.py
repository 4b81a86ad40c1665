"""Read a committed checkpoint: its root document, its chunks and its arrays. No torch."""
