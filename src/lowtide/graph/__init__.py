"""What the graph of autograd saved, where, and what backward needs of it."""
