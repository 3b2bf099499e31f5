"""Tools around the library: the demo, and the models that the command line names."""
