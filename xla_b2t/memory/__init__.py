"""What a program needs of a core, memory and time."""
