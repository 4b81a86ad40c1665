"""The commit protocol: begin an attempt, put chunks, commit, clean up. Uses stores and documents only. No torch."""
