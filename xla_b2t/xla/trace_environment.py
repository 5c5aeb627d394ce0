"""What torch_xla must be imported under for a process that traces and does not run (`xla/trace.py`)."""

ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "XLA_ALWAYS_ALLREDUCE": "1",  # reductions stay in the graph of a single process
    "XLA_IR_DEBUG": "1",  # operations know the Python line they come from
    "XLA_HLO_DEBUG": "1",
}
