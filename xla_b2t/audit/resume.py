"""Whether a run may go on under another configuration.

A resumed run is to equal the uninterrupted one, so what the weights and the order of trials depend on must not change.
The number of cores may, as long as the global batch stays: the schedule deals the same groups.
"""

from pathlib import Path

import msgspec

from xla_b2t import config as configuration
from xla_b2t.audit.findings import Finding
from xla_b2t.config import Config

MAY_CHANGE = (
    "run.dir", "run.cores", "data.dir", "data.prefetch_batches",
    "train.steps", "train.batch_size", "train.global_batch", "train.accumulation", "train.log_every",
    "train.checkpoint_every", "validation.every", "validation.split", "validation.batch_size",
)  # fmt: skip


def changed_keys(before_path: Path, config: Config) -> list[Finding]:
    """A finding for every key whose change would make another run of it.

    Args:
        before_path: `config.toml` of the run.
        config: what it is to go on with.

    Raises:
        UserError: the file cannot be read.
    """
    before = _flat(msgspec.to_builtins(configuration.load(before_path)))
    now = _flat(msgspec.to_builtins(config))
    return [
        Finding(
            "resume",
            key,
            str(before_path),
            repr(now.get(key)),
            f"{before.get(key)!r}, with which this run began",
            f"leave {key} as it was, or begin another run with --set run.dir=",
        )
        for key in sorted(before.keys() | now.keys())
        if key not in MAY_CHANGE and before.get(key) != now.get(key)
    ]


def changed_batch(before: int, now: int, where: str) -> list[Finding]:
    """A finding when the trials an update are not what they were."""
    if before == now:
        return []
    fix = f"set train.global_batch={before}, or choose batch size, accumulation and cores that give it"
    return [Finding("resume", "trials an update", where, str(now), f"{before}, with which this run began", fix)]


def _flat(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
