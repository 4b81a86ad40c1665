"""Operations on whole checkpoints: verify, recover, remove, copy. No torch."""
