"""How do bytes move?

A full mesh of links between the N tasks of a group. Every task binds one address and connects to all
the others; a link carries bytes one way, so there are two between each pair. One engine thread a group
owns every socket (`mesh.py`); the start-up protocol (`handshake.py`), the frames (`framing.py`), the
addresses (`addresses.py`) and the keys (`security.py`) are plain functions and state machines beside it.
"""

from tfdist_ext.transport.addresses import Address
from tfdist_ext.transport.framing import MAX_PAYLOAD_BYTES, ProtocolViolation
from tfdist_ext.transport.handler import Handler
from tfdist_ext.transport.handshake import Identity
from tfdist_ext.transport.mesh import Mesh

__all__ = ["MAX_PAYLOAD_BYTES", "Address", "Handler", "Identity", "Mesh", "ProtocolViolation"]
