"""What is done to a checkpoint as a whole: verify, recover, remove, copy. No torch."""
