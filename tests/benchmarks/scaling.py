"""What an update costs on many ranks: counted on paper, and simulated layer by layer. Needs nothing but Python.

    python tests/benchmarks/scaling.py

prints the tables of docs/explanation/scaling.md. The machine is assumed, not measured; change its numbers for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

RANKS = (8, 64, 1024)
GB = 1e9


@dataclass(frozen=True)
class Machine:
    """Rates of one rank; all are assumptions.

    Attributes
    ----------
    memory : float
        Bytes a second that a rank moves in its own memory.
    inside, between : float
        Bytes a second that a rank sends to others, in a node and from node to node.
    in_node : int
        Ranks of a node.
    latency : float
        Seconds that a small message takes from rank to rank.
    compute : float
        Operations a second that a rank reaches in matrix products.
    """

    memory: float = 4.3e12
    inside: float = 450e9
    between: float = 50e9
    in_node: int = 8
    latency: float = 5e-6
    compute: float = 400e12

    def wire(self, ranks: int) -> float:
        """Bytes a second of a ring of ranks: its slowest link."""
        return self.inside if ranks <= self.in_node else self.between


@dataclass(frozen=True)
class Model:
    """What is trained: weights, moments and average in float32, gathered in bfloat16, gradients reduced in float32."""

    parameters: float = 10e9
    layers: int = 40
    tensors: int = 400
    tokens: int = 4_194_304  # of a step, on all ranks together


def state_bytes(model: Model, ranks: int, *, sharded: bool, average: bool) -> float:
    """Bytes of weights, gradients, two moments and the average that a rank keeps."""
    return model.parameters * (16 + 4 * average) / (ranks if sharded else 1)


def update_bytes(model: Model, ranks: int, *, sharded: bool, average: bool) -> float:
    """Bytes that a rank moves in its own memory for an update.

    4 for the norm; 32 for AdamW, which reads and writes gradient, weight and moments; 12 for the average.
    """
    return model.parameters * (36 + 12 * average) / (ranks if sharded else 1)


def wire_bytes(model: Model, ranks: int, *, sharded: bool) -> float:
    """Bytes that a rank sends in a step: two gathers of bfloat16 and a reduction, or the reduction of DDP, in rings."""
    each = 2 + 2 + 4 if sharded else 2 * 4
    return each * model.parameters * (ranks - 1) / ranks


def collectives(groups: int, *, sharded: bool, buckets: int = 0) -> int:
    """Collectives of a step: those of the model, and the one message of the update; an average adds none.

    FSDP2 gathers each group of parameters twice, the outermost once, and reduces each once. DDP reduces buckets.
    """
    return (groups + (groups - 1) + groups if sharded else buckets) + 1


def message_seconds(machine: Machine, ranks: int) -> float:
    """Seconds of a message of some bytes that all ranks wait for: up a tree, and down."""
    return 2 * log2(ranks) * machine.latency


def update_seconds(machine: Machine, model: Model, ranks: int, *, sharded: bool, average: bool = True) -> float:
    """Seconds from the last gradient to the last average."""
    moved = update_bytes(model, ranks, sharded=sharded, average=average) / machine.memory
    return moved + message_seconds(machine, ranks)


def step_seconds(machine: Machine, model: Model, ranks: int) -> tuple[float, float]:
    """Simulate a step of FSDP2 on two streams; seconds in all, and those of them in which the rank computes.

    A layer is computed when it is there; the next is gathered meanwhile, one ahead. In the backward pass gradients are
    reduced behind the gathers.
    """
    send = model.parameters / model.layers * (ranks - 1) / ranks / machine.wire(ranks)
    gather, reduce = 2 * send, 4 * send
    forward = 2 * model.parameters / model.layers * (model.tokens / ranks) / machine.compute
    wire = compute = begun = 0.0  # when the link and the processor are free, and when the latest layer was begun
    for _ in range(model.layers):
        wire = max(wire, begun) + gather
        begun = max(wire, compute)
        compute = begun + forward
    for layer in range(model.layers):
        wire = max(wire, begun) + gather
        begun = max(wire, compute)
        compute = begun + 2 * forward
        wire = begun + reduce if layer else wire  # of the layer before
    wire = max(wire, compute) + reduce
    return wire + update_seconds(machine, model, ranks, sharded=True), 3 * model.layers * forward


def header_bytes(model: Model, ranks: int, *, average: bool = True) -> float:
    """Bytes of the headers of a checkpoint, which every rank reads when it loads: some 230 for each piece."""
    return 230 * model.tensors * (3 + average) * ranks


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def costs(machine: Machine, model: Model) -> str:
    """What DDP and FSDP2 cost each rank, with the average and without."""
    rows = []
    for ranks in RANKS:
        for name, sharded in (("DDP", False), ("FSDP2", True)):
            kept = [state_bytes(model, ranks, sharded=sharded, average=one) / GB for one in (False, True)]
            moved = [update_bytes(model, ranks, sharded=sharded, average=one) / GB for one in (False, True)]
            count = collectives(model.layers + 1, sharded=sharded, buckets=int(4 * model.parameters / 25e6))
            rows.append(
                (
                    f"{ranks:,}", name, f"{kept[0]:,.2f} / {kept[1]:,.2f}", f"{moved[0]:,.2f} / {moved[1]:,.2f}",
                    f"{wire_bytes(model, ranks, sharded=sharded) / GB:,.0f}", f"{count:,}",
                    f"{1e3 * update_seconds(machine, model, ranks, sharded=sharded):,.2f}",
                )
            )  # fmt: skip
    head = ("ranks", "", "state, GB", "update moves, GB", "sent a step, GB", "collectives a step", "update, ms")
    return _table(head, rows)


def limits(machine: Machine, model: Model) -> str:
    """Where more ranks stop helping."""
    rows = []
    for ranks in (8, 64, 256, 1024, 4096):
        seconds, busy = step_seconds(machine, model, ranks)
        update = update_seconds(machine, model, ranks, sharded=True)
        waits = message_seconds(machine, ranks) / update
        rows.append(
            (
                f"{ranks:,}", f"{model.tokens // ranks:,}", f"{seconds:,.2f}", f"{100 * busy / seconds:.0f} %",
                f"{1e3 * update:,.2f}", f"{100 * waits:.0f} %", f"{header_bytes(model, ranks) / GB:,.2f}",
            )
        )  # fmt: skip
    head = (
        "ranks",
        "tokens a rank",
        "step, s",
        "computing",
        "update, ms",
        "of it waiting",
        "headers of a checkpoint, GB",
    )
    return _table(head, rows)


if __name__ == "__main__":
    print(costs(Machine(), Model()), limits(Machine(), Model()), sep="\n\n")
