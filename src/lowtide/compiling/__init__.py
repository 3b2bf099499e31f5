"""Compression inside ``torch.compile``: the compiled graph itself hands packed tensors from forward to backward."""
