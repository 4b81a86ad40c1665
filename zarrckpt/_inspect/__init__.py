"""A checkpoint for people: sizes, numbers, differences, a page. No torch."""
