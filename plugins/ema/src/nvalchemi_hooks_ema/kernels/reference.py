"""The equation, literally: one tensor at a time, the oracle of the other kernels."""

from __future__ import annotations

from torch import Tensor

__all__ = ["blend"]


def blend(average: Tensor, value: Tensor, decay: float) -> Tensor:
    r"""Return the next exponential moving average.

    .. math:: e_{t} = d \, e_{t-1} + (1 - d) \, w_{t}

    Parameters
    ----------
    average : torch.Tensor
        The average so far, any shape, floating or complex.
    value : torch.Tensor
        The newest value, of the same shape and dtype.
    decay : float
        The weight of the average so far, from 0 to 1.

    Returns
    -------
    torch.Tensor
        A new tensor, in the precision of the given ones; give float64 where the result is to be compared with.

    References
    ----------
    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim. 30 (1992).

    Examples
    --------
    >>> import torch
    >>> blend(torch.tensor([1.0]), torch.tensor([3.0]), 0.5)
    tensor([2.])
    """
    return decay * average + (1 - decay) * value
