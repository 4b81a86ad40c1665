"""One module for each training framework, built on the public API. Importing zarrckpt does not import them."""
