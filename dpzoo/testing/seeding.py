"""`set_seed`: torch's generators, without the price of devices that no test uses."""

import torch


def set_seed(seed: int) -> None:
    """Seed the generator of the CPU, and those of CUDA devices once CUDA is in use.

    `torch.manual_seed` keeps, for each kind of device that is not in use, a formatted stack of its caller: that takes
    milliseconds, more than most ops under test.
    """
    if torch.cuda.is_initialized():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
