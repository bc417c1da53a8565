"""How do replicas agree on one value?

`ProcessGroup` is the public class. Below it, each collective is a state machine over NumPy buffers that
knows neither sockets nor threads (`ring.py`, `direct.py`, `exchange.py`), and `streams.py` matches the
operations of one task with those of the others.
"""

from tfdist_ext.collectives.compression import TopK
from tfdist_ext.collectives.future import Future, StreamAbandoned
from tfdist_ext.collectives.process_group import ProcessGroup

__all__ = ["Future", "ProcessGroup", "StreamAbandoned", "TopK"]
