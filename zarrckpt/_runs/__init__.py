"""A folder of checkpoints as one run: which is the newest, which are kept, whose they are; saves before pre-emption."""
