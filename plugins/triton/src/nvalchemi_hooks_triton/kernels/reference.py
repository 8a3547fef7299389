"""The equations, literally: one number at a time in double precision. Slow, and the oracle of the others."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Element", "update"]


class Element(NamedTuple):
    """One weight and all that belongs to it.

    Attributes
    ----------
    weight, first, second : float
        The weight and its two moments.
    average : float
        The moving average of the weight.
    step : float
        How many steps were taken.
    """

    weight: float
    first: float
    second: float
    average: float
    step: float


def update(
    element: Element,
    gradient: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    maximize: bool = False,
    divisor: float = 1.0,
    veto: float = 0.0,
    share: float = 0.0,
) -> Element:
    r"""Return what becomes of one weight in one step.

    With :math:`g = \pm\,\mathrm{grad} / d` and :math:`w' = (1 - \eta \lambda)\, w`, or, if the decay is not decoupled,
    :math:`g \leftarrow g + \lambda w` and :math:`w' = w`:

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2)\, g^2 \\
        w_t &= w' - \frac{\eta}{1 - \beta_1^t} \frac{m_t}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}, \qquad
        e_t = e_{t-1} + s\, (w_t - e_{t-1})

    Parameters
    ----------
    element : Element
        The weight as it was.
    gradient : float
        Its gradient, with whatever `divisor` takes out still in it.
    lr, betas, eps, weight_decay, maximize
        As in `torch.optim.AdamW`.
    decoupled : bool
        Whether the decay is that of AdamW; False: that of Adam.
    divisor : float
        Loss scale times clipping factor.
    veto : float
        1.0 leaves everything as it was.
    share : float
        1 - decay of the average.

    References
    ----------
    D. P. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015; I. Loshchilov and F. Hutter,
    "Decoupled weight decay regularization", ICLR 2019.

    Examples
    --------
    >>> still = Element(weight=1.0, first=0.0, second=0.0, average=1.0, step=0.0)
    >>> update(still, 2.0, lr=0.1, betas=(0.5, 0.5), eps=0.0, weight_decay=0.0, share=0.5)
    Element(weight=0.9, first=1.0, second=2.0, average=0.95, step=1.0)
    """
    if veto:
        return element
    step = element.step + 1.0
    grad = (-gradient if maximize else gradient) / divisor
    weight = element.weight
    if decoupled:
        weight -= lr * weight_decay * weight
    else:
        grad += weight_decay * weight
    first = betas[0] * element.first + (1.0 - betas[0]) * grad
    second = betas[1] * element.second + (1.0 - betas[1]) * grad**2
    unbiased = first / (1.0 - betas[0] ** step), second / (1.0 - betas[1] ** step)
    weight -= lr * unbiased[0] / (math.sqrt(unbiased[1]) + eps)
    return Element(weight, first, second, element.average + share * (weight - element.average), step)
