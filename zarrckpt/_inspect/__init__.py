"""Show a checkpoint to people: its sizes, statistics, differences, and an HTML page. No torch."""
