"""The commit protocol: begin an attempt, commit, clean up, remove, pin. Uses stores and documents only. No torch."""
