"""What is proven of a run before its first step."""
