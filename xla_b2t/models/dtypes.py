"""The dtypes a model may compute in, by their names in the configuration."""

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
