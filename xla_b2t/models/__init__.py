"""Decoders and their parts, the CTC loss and the augmentation: plain torch, with scans taken from the xla package."""
