"""xla_b2t trains brain-to-text decoders, neural features in and phonemes out, on TPU cores in pure torch_xla."""
