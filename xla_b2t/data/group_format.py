"""What the writer and the reader of groups agree on; docs/FORMAT.md says it in words.

In: a group's arrays. Out: names and its checksum.
"""

import zlib

import numpy as np

FORMAT = "xla_b2t groups"
FORMAT_VERSION = 1
MANIFEST = "report.json"
"""Written last; a folder without it is no group set."""

SMALL_DATASETS = ("input_bins", "labels", "label_lengths", "required_steps", "days", "valid", "trial_ids")
"""Everything of a group but its features, in the order in which the checksum takes them."""


def group_name(group: int) -> str:
    """Name of a group in its file."""
    return f"{group:04d}"


def group_checksum(features_BTC: np.ndarray, small: dict[str, np.ndarray]) -> int:
    """CRC-32 over the features' bits and then the other datasets, as they are stored."""
    checksum = zlib.crc32(features_BTC)
    for name in SMALL_DATASETS:
        checksum = zlib.crc32(np.ascontiguousarray(small[name]).tobytes(), checksum)
    return checksum
