"""The commit protocol: begin an attempt, commit it, clean up. It knows stores and documents, no state. No torch."""
