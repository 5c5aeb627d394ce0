"""The run: optimizer, step, loop, checkpoints, the event log and the progress display."""
