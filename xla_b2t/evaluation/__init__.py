"""From logits to phonemes, and from phonemes to an error rate."""
