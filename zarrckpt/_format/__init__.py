"""The stored format: documents, values, dtypes, chunks and their codecs. No I/O, no store, no torch."""
