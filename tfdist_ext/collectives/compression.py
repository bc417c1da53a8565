"""How much of a gradient travels, and when is that less than all of it? Pure arithmetic, no TensorFlow."""

from __future__ import annotations

import dataclasses

INDEX_BYTES = 4
# Their values fit into whole words of 4 bytes beside the indices.
_DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK:
    """Workers send the largest entries of each gradient and keep the rest for later steps (error feedback).

    Runs on: every worker of a `MultiWorkerMirroredStrategy`. With the residual e of a worker, 0 at first, and its
    gradient g of a variable, each step does

        u = g + e,   sent = the k entries of u that are largest in magnitude,   e = u - sent

    and the gradient that the optimizer gets is the sum of what the workers sent. So nothing is lost, it comes
    later: over any number of steps, what was sent and the last e add up to all g. Gradients that are sparse, small,
    or not of float32 or float64 travel whole.

    A worker receives 8 k (P - 1) bytes of a float32 gradient of n elements from the other P - 1 workers, against
    8 n (P - 1) / P with the ring: it pays only where k / n < 1 / P.

    Attributes:
        fraction: k / n, above 0 and at most 1; 0.01 by default, as in the paper. 1 sends everything.
        min_elements: Gradients with fewer elements travel whole: their messages cost latency, not bytes.

    Raises:
        ValueError: `fraction` or `min_elements` is out of range.

    Example:
        >>> TopK(fraction=0.01).num_sent(250_000)
        2500

    References:
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
        Lin et al., "Deep Gradient Compression", ICLR 2018.
    """

    fraction: float = 0.01
    min_elements: int = 1024

    def __post_init__(self):
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"Argument `fraction` must be above 0 and at most 1; received {self.fraction}. Try 0.01."
            )
        if self.min_elements < 1:
            raise ValueError(
                f"Argument `min_elements` must be at least 1; received {self.min_elements}. Try 1024."
            )

    def num_sent(self, num_elements: int) -> int:
        """Says how many entries of a gradient are sent.

        Args:
            num_elements: Its size.

        Returns:
            At least 1.
        """
        return max(1, round(self.fraction * num_elements))

    def compresses(self, dtype: str, num_elements: int | None) -> bool:
        """Says whether a dense gradient is compressed.

        Args:
            dtype: Its dtype's name.
            num_elements: Its size, or None where only the run knows it.

        Returns:
            False where it travels whole.
        """
        if num_elements is None or dtype not in _DTYPES:
            return False
        return self.min_elements <= num_elements < 2**31


def top_k_bytes(num_sent: int, item_bytes: int, num_workers: int) -> int:
    """Says what each worker receives of a compressed gradient.

    Args:
        num_sent: Entries that a worker sends.
        item_bytes: Bytes of a value.
        num_workers: Number of workers.

    Returns:
        Bytes.
    """
    return (INDEX_BYTES + item_bytes) * num_sent * (num_workers - 1)


def ring_bytes(num_elements: int, item_bytes: int, num_workers: int) -> int:
    """Says what each worker receives of a gradient that travels whole, by a ring.

    Args:
        num_elements: Its size.
        item_bytes: Bytes of a value.
        num_workers: Number of workers.

    Returns:
        Bytes.
    """
    return 2 * item_bytes * num_elements * (num_workers - 1) // num_workers
