"""Tools around the library: the demo."""
