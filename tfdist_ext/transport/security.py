"""Who may open a link? CURVE keys derived from one cluster secret, and the policy that demands one."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence

import zmq
import zmq.utils.z85
from absl import logging

from tfdist_ext import errors
from tfdist_ext.cluster.environment import MIN_SECRET_LENGTH
from tfdist_ext.transport.addresses import Address

_SECONDS_BETWEEN_WARNINGS = 10.0
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"tfdist_ext"


def require_secret_beyond_loopback(addresses: Sequence[Address], secret: str | None, insecure: bool) -> None:
    """Refuses links that leave this machine unless they are authenticated, or openness was asked for.

    Raises:
        AuthenticationError: If an address is not a loopback address, and neither `secret` nor `insecure` is
            given.
        ValueError: If both are given, or `secret` is empty or short.
    """
    if secret is not None and not secret:
        raise ValueError("Argument `secret` must not be empty. Pass None to use no secret.")
    if secret is not None and len(secret) < MIN_SECRET_LENGTH:
        raise ValueError(
            f"The cluster secret has {len(secret)} characters, and who tries them all would find it: give at least "
            f"{MIN_SECRET_LENGTH}. `openssl rand -hex 32` makes one."
        )
    if secret and insecure:
        raise ValueError("Arguments `secret` and `insecure=True` contradict each other; pass one of them.")
    exposed = [str(address) for address in addresses if not address.is_loopback]
    if exposed and not secret and not insecure:
        raise errors.AuthenticationError(
            f"The links to {exposed[0]} leave this machine, so anybody on the network could join or read the "
            f"job. "
            "Give every task the same long random text as TFDIST_EXT_CLUSTER_SECRET (`openssl rand -hex 32` makes "
            "one) or argument `cluster_secret`; or, on a network that you trust, pass `insecure=True`."
        )


class Curve:
    """One deterministic CURVE key pair, the same on every task that was given the same secret.

    All tasks of a group trust each other alike, so they share one identity: a link is accepted if and only if
    the other end holds the same secret key. Sessions still get fresh keys each (CurveZMQ is forward secret).

    References:
        D. J. Bernstein, "CurveCP: Usable security for the Internet", 2011; CurveZMQ, ZeroMQ RFC 26.
        C. Percival, S. Josefsson, "The scrypt Password-Based Key Derivation Function", RFC 7914, 2016.
    """

    def __init__(self, secret: str):
        # The salt is a constant because every task must arrive at the same key without having talked before.
        seed = hashlib.scrypt(secret.encode(), salt=b"tfdist_ext curve key 1", n=2**14, r=8, p=1, dklen=32)
        self._secret_key = zmq.utils.z85.encode(seed)
        self.public_key = zmq.curve_public(self._secret_key)

    def protect_listener(self, socket: zmq.Socket) -> None:
        """Makes `socket` accept only links that a `Gatekeeper` of the same context admits."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret_key
        socket.curve_publickey = self.public_key
        socket.zap_domain = _ZAP_DOMAIN

    def protect_connector(self, socket: zmq.Socket) -> None:
        """Makes `socket` talk only to holders of the same secret."""
        socket.curve_serverkey = self.public_key
        socket.curve_secretkey = self._secret_key
        socket.curve_publickey = self.public_key


class Gatekeeper:
    """Answers ZeroMQ's authentication requests (ZAP, ZeroMQ RFC 27) for one context.

    Without it a CURVE listener accepts every client that knows the public key.
    """

    def __init__(self, context: zmq.Context, curve: Curve, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._num_refused = 0
        self._warned_at = -math.inf
        self._allowed_key = zmq.utils.z85.decode(curve.public_key)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def answer_requests(self) -> None:
        """Answers every waiting request; never blocks."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request_id, domain, address = (request + [b""] * 4)[:4]
            mechanism, key = (request[5:7] + [b"", b""])[:2]
            admitted = (
                version == b"1.0"
                and domain == _ZAP_DOMAIN
                and mechanism == b"CURVE"
                and key == self._allowed_key
            )
            if not admitted:
                self._tell_of_refusal(address.decode("ascii", "replace"))
            status = [b"200", b"OK", b"tfdist_ext"] if admitted else [b"400", b"wrong key", b""]
            self.socket.send_multipart([b"1.0", request_id, *status, b""])

    def _tell_of_refusal(self, address: str) -> None:
        """Warns of refused links, and not more often than every 10 seconds: whoever tries would fill the log."""
        self._num_refused += 1
        if self._now() - self._warned_at < _SECONDS_BETWEEN_WARNINGS:
            return
        self._warned_at = self._now()
        logging.warning(
            "Refused a link from %s: it does not hold the cluster secret. %d refused so far.",
            address,
            self._num_refused,
        )
