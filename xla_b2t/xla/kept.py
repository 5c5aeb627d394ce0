"""What tensors of the core hold at this moment, so that what was traced with them since can be undone.

torch_xla forgets what was traced when its compile is refused, and what the tensors held with it. The buffers are still
there, unless a graph was started that they were donated to.
"""

import torch
import torch_xla


class Kept:
    """Tensors of its own on the same buffers: nothing is copied, and nothing keeps a buffer from being donated.

    Args:
        tensors: of the core, after `sync`: with nothing traced that they wait for.
    """

    def __init__(self, tensors: list[torch.Tensor]):
        self._tensors = tensors
        self._own: list[torch.Tensor] = []
        if tensors:
            context = torch_xla._XLAC.lowering.LoweringContext("kept")
            context.build(tensors)
            inputs = context.device_parameter_id_tensor_mapping()
            self._own = [inputs[context.tensor_parameter_id(tensor)] for tensor in tensors]

    def is_there(self) -> bool:
        """Whether no started graph has taken a buffer."""
        try:
            torch_xla._XLAC._get_tensors_handle(self._own)
        except RuntimeError:  # "buffer ... is deleted", or it waits for a graph that failed
            return False
        return True

    def put_back(self) -> None:
        """Gives the tensors their buffers again, and lets nothing that was traced since go into the next graph."""
        for tensor, own in zip(self._tensors, self._own, strict=True):
            tensor.data = own
        torch_xla._XLAC._set_all_reduce_token(str(torch_xla.device()), None)
