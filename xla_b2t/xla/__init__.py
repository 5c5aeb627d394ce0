"""The only room that imports torch_xla: ranks, collectives, the feed, scans and what is counted about compiles."""
