"""One module for each framework that trains: imported only when asked for, on top of the public API."""
