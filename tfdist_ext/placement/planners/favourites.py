"""Which operation should follow which on the same device? The linear program of SCT."""

from __future__ import annotations

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph

_MOST_EDGES = 200_000


def favourite_parents(graph: OperationGraph, machine: Machine) -> dict[str, str]:
    """Returns, for each operation that is the favourite of one before it, that one.

    With x = 0 for a favourite edge and 1 for one whose tensor may have to be sent, the program makes the makespan w
    least, given t_i + p_i + x_ij c_ij <= t_j, at most one favourite after and before each operation, t_i + p_i <= w;
    x is then rounded: below 1/2 is favourite.

    Raises:
        ImportError: SciPy is not installed; the message says how to install it.
        ValueError: The graph is too large.

    References:
        Hanen and Munier, 1995; Jeon et al., "Baechi", SoCC 2020.
    """
    try:
        import numpy as np
        from scipy import optimize, sparse
    except ImportError as error:
        raise ImportError(
            'Method "m-sct" solves a linear program with SciPy, which is not installed. Run '
            "`pip install 'tfdist_ext[placement]'`, or choose method=\"m-etf\"."
        ) from error
    names = list(graph.operations)
    index = {name: number for number, name in enumerate(names)}
    pairs: dict[tuple[int, int], int] = {}
    for edge in graph.edges:
        if not edge.is_control:
            pair = index[edge.producer], index[edge.consumer]
            pairs[pair] = max(pairs.get(pair, 0), edge.num_bytes)
    if not pairs:
        return {}
    if len(pairs) > _MOST_EDGES:
        raise ValueError(
            f'The graph has {len(pairs)} edges, too many for a linear program. Try method="m-etf".'
        )
    compute = [_mean_seconds(graph, machine, name) for name in names]
    devices = [device.name for device in machine.devices]
    elsewhere = [(a, b) for a in devices for b in devices if a != b] or [(devices[0], devices[0])]
    send = [
        sum(machine.transfer_seconds(a, b, size) for a, b in elsewhere) / len(elsewhere)
        for size in pairs.values()
    ]
    num_times, num_edges = len(names), len(pairs)
    # Unknowns: t of each operation, x of each edge, w.
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    bounds_above: list[float] = []

    def less_or_equal(terms, bound):
        for column, value in terms:
            rows.append(len(bounds_above))
            columns.append(column)
            values.append(value)
        bounds_above.append(bound)

    after: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for number, ((producer, consumer), seconds) in enumerate(zip(pairs, send, strict=True)):
        x = num_times + number
        less_or_equal([(producer, 1.0), (consumer, -1.0), (x, seconds)], -compute[producer])
        after.setdefault(producer, []).append(x)
        before.setdefault(consumer, []).append(x)
    for edges in [*after.values(), *before.values()]:
        less_or_equal([(x, -1.0) for x in edges], 1.0 - len(edges))
    for number in range(num_times):
        less_or_equal([(number, 1.0), (num_times + num_edges, -1.0)], -compute[number])
    matrix = sparse.csr_matrix(
        (values, (rows, columns)), shape=(len(bounds_above), num_times + num_edges + 1)
    )
    objective = np.zeros(num_times + num_edges + 1)
    objective[-1] = 1.0
    limits = [(0, None)] * num_times + [(0, 1)] * num_edges + [(0, None)]
    solved = optimize.linprog(objective, A_ub=matrix, b_ub=bounds_above, bounds=limits, method="highs")
    if not solved.success:
        return {}
    chosen: dict[str, str] = {}
    for (producer, consumer), x in zip(pairs, solved.x[num_times:-1], strict=True):
        if x < 0.5:
            chosen[names[consumer]] = names[producer]
    return chosen


def _mean_seconds(graph: OperationGraph, machine: Machine, name: str) -> float:
    read = sum(edge.num_bytes for edge in graph.incoming(name))
    return sum(device.seconds(graph.operations[name], read) for device in machine.devices) / len(
        machine.devices
    )
