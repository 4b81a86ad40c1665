"""Runs: folders of checkpoints of one training. Finds, keeps and deletes checkpoints, and saves before pre-emption."""
