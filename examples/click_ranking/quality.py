"""How good are predicted clicks?"""

import numpy as np


def log_loss(logits: np.ndarray, clicked: np.ndarray) -> float:
    """Returns the mean of `-log P(what happened)` in nats.

    Args:
        logits: `[rows]`; a click has the probability `sigmoid(logit)`.
        clicked: `[rows]` of 0.0 and 1.0.
    """
    logits = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, logits) - clicked * logits))


def entropy(chances) -> float:
    """Returns the mean entropy of clicks in nats: the log-loss that whoever knows their probabilities expects.

    Args:
        chances: Probabilities between 0 and 1, both excluded.
    """
    chances = np.asarray(chances, np.float64)
    return float(-np.mean(chances * np.log(chances) + (1 - chances) * np.log1p(-chances)))


def area_under_curve(logits: np.ndarray, clicked: np.ndarray) -> float:
    """Returns how often a row with a click has a larger logit than one without; 0.5 is guessing.

    Args:
        logits: `[rows]`.
        clicked: `[rows]` of 0.0 and 1.0, both present.
    """
    ranks = np.empty(len(logits))
    ranks[np.argsort(logits)] = np.arange(1, len(logits) + 1)
    num_clicks = clicked.sum()
    above = ranks[clicked == 1].sum() - num_clicks * (num_clicks + 1) / 2
    return float(above / (num_clicks * (len(clicked) - num_clicks)))
