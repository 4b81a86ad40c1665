"""One load, step by step. ``run`` is the story; the other modules are its steps. Knows no class of DCP."""
