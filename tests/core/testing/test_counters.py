"""Exact costs: operations, bytes and host reads."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.testing import StepCost


def cost(do) -> StepCost:
    with StepCost() as counted:
        do()
    return counted


@pytest.mark.parametrize(
    ("do", "moved"),
    [
        (lambda t: t + t, 40 + 40),  # what is given twice is read once
        (lambda t: t + torch.ones(10), 40 + 40 + 40 + 40),  # ones are written, then read
        (lambda t: t.add_(1.0), 40 + 40),
        (lambda t: t.zero_(), 40),
        (lambda t: t.copy_(torch.empty(10)), 40 + 40 + 40),
        (lambda t: t.sum(), 40 + 4),
        (lambda t: torch._foreach_add_([t, t[:5]], 1.0), 2 * (40 + 20)),
    ],
)
def test_bytes_are_those_read_and_written(do, moved):
    """Each operation counts what it reads and what it writes, once each."""
    tensor = torch.ones(10)
    assert cost(lambda: do(tensor)).bytes == moved


def test_views_are_free():
    """Views and detaching are no operations."""
    tensor = torch.ones(4, 4)
    counted = cost(lambda: tensor.detach().view(16)[2:4].unsqueeze(0).t())
    assert (counted.ops, counted.bytes) == (0, 0)


@pytest.mark.parametrize("read", [torch.Tensor.item, float, bool, lambda t: torch.equal(t, t), torch.nonzero])
def test_host_reads_are_found_with_their_place(read):
    """Whatever waits for the device counts as a host read, is no operation, and is found where it stands."""
    tensor = torch.ones(())
    counted = cost(lambda: read(tensor))
    assert (counted.host_reads, counted.ops) == (1, 0)
    assert len(counted.host_read_sites) == 1


def test_the_place_of_a_host_read_is_the_line_that_reads():
    """The site names this file and the code that reads."""
    with StepCost() as counted:
        torch.ones(()).item()
    assert "test_counters.py" in counted.host_read_sites[0]
    assert "torch.ones(()).item()" in counted.host_read_sites[0]


@pytest.mark.parametrize(("scale", "per_element"), [(None, 28), (torch.tensor(2.0), 32)])
def test_a_fused_step_writes_gradients_back_only_where_it_divides_them(scale, per_element):
    """Fused AdamW moves 28 bytes a parameter, and 32 with a divisor."""
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    if scale is not None:
        optimizer.grad_scale = scale
    counted = cost(optimizer.step)
    assert counted.bytes_by_name["_fused_adamw_"] // 1000 == per_element
    assert counted.ops_by_name["_fused_adamw_"] == 1
