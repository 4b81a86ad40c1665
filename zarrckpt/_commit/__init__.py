"""The commit protocol: begin an attempt, put chunks, commit, clean. Knows stores and documents, no state. No torch."""
