"""Tools around the library: measuring memory, the demo, the tuning of malloc."""
