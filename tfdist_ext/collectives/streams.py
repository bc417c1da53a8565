"""Which operation here is which operation there?

Operations of one stream are matched by counting them: the k-th of a stream on one task belongs to the k-th of
that stream on the others. Different streams know nothing of each other. Everything in this file happens in
the engine thread of the transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfdist_ext import errors
from tfdist_ext.collectives.future import StreamAbandoned
from tfdist_ext.collectives.message import Kind, Message, pack_body, pack_names, unpack_body
from tfdist_ext.collectives.operation import Operation
from tfdist_ext.collectives.outbox import Budget, Outbox
from tfdist_ext.collectives.stream import Failure, Stream
from tfdist_ext.transport import ProtocolViolation, framing

_ASK_AFTER_SECONDS = 1.0
_TICK_SECONDS = 0.1
_REASON_LENGTH = 2000
_STREAM_ERRORS = {
    error.__name__: error
    for error in (errors.SignatureMismatchError, errors.CollectiveTimeoutError, errors.CollectiveError)
}


class StreamTable:
    """All streams of one task; the `Handler` of its mesh.

    Args:
        rank: This task.
        task_names: Names of all tasks, by rank.
        early_limit_bytes: Bound on what peers may send ahead of this task.
        ahead_limit_bytes: Bound on what this task sends to each peer ahead of it.
    """

    def __init__(
        self, rank: int, task_names: tuple[str, ...], *, early_limit_bytes: int, ahead_limit_bytes: int
    ):
        self._rank = rank
        self._task_names = task_names
        self._early_limit_bytes = early_limit_bytes
        self._early_bytes = 0
        self._budget = Budget(ahead_limit_bytes)
        self._mesh: Any = None
        self._streams: dict[str, Stream] = {}
        self._abandoned: set[str] = set()
        self._left: dict[int, dict[str, int]] = {}
        self._lost: tuple[int, str] | None = None
        self._closed: Exception | None = None
        self.last_failure: errors.CollectiveError | None = None

    def attach(self, mesh: Any) -> None:
        """Tells where to send; before the first operation."""
        self._mesh = mesh

    # What this task does.

    def new_outbox(self) -> Outbox:
        """Returns what an operation of this task sends through. Any thread."""
        return Outbox(self._budget)

    def submit(self, operation: Operation) -> None:
        """Enters an operation."""
        error = self._reason_to_refuse(operation)
        if error is not None:
            self._record(error)
            operation.future.set_error(error)
            return
        stream = self._streams.setdefault(operation.stream, Stream())
        sequence = stream.next_sequence
        stream.next_sequence += 1
        stream.pending[sequence] = operation
        early, askers = stream.early.pop(sequence, []), stream.askers.pop(sequence, set())
        for rank in askers | {message.peer for message, _ in early}:
            operation.outbox.peer_joined(rank)  # Before the start, which may then send everything at once.
        self._post(operation, sequence, operation.machine.start())
        for message, signature in early:
            self._early_bytes -= memoryview(message.payload).nbytes
            if sequence in stream.pending:
                self._deliver(stream, sequence, message, signature)
        for rank in askers:
            self._mesh.send(rank, pack_body(Kind.JOINED, 0, sequence, 0, operation.names))
        self._finish_if_done(stream, sequence)
        self._fail_without_departed(operation.stream, stream)
        self._send_for_relief()

    def abandon_all(self, prefix: str, reason: str) -> None:
        """Takes no more part in the streams whose names begin with `prefix`."""
        for name in [name for name in self._streams if name.startswith(prefix)]:
            self.abandon(name, reason)

    def abandon(self, name: str, reason: str = "") -> None:
        """Takes no more part in the stream `name`."""
        if name in self._abandoned or self._closed is not None:
            return
        stream = self._streams.pop(name, None) or Stream()
        body = pack_body(Kind.ABANDON, 0, stream.first_incomplete, 0, pack_names(name, ""))
        payload = memoryview(framing.pack_json({"reason": reason[:_REASON_LENGTH]}))
        for rank in self._peers():
            self._mesh.send(rank, body, payload)
        for operation in stream.pending.values():
            operation.outbox.close()
            operation.future.set_error(operation.abandoned_error(self._rank))
        self._forget_early(stream)
        self._abandoned.add(name)
        self._send_for_relief()

    def _reason_to_refuse(self, operation: Operation) -> Exception | None:
        if self._lost is not None:
            return operation.lost_error(*self._lost, earlier=True)
        if self._closed is not None:
            return operation.error(errors.CollectiveError, str(self._closed), self._task_names[self._rank])
        if operation.stream in self._abandoned:
            return operation.abandoned_error(self._rank)
        stream = self._streams.get(operation.stream)
        if stream is not None and stream.failure is not None:
            failure = stream.failure
            return operation.error(
                failure.error_class, f"The stream failed before: {failure.text}", failure.task
            )
        return None

    # What peers do.

    def receive(self, source: int, body: bytes, payload: memoryview) -> None:
        """Takes a message of a peer."""
        kind, hop, sequence, piece, name, signature = unpack_body(body)
        if name in self._abandoned or self._lost is not None or self._closed is not None:
            return
        stream = self._streams.setdefault(name, Stream())
        if stream.failure is not None:
            return
        if kind is Kind.DATA:
            message = Message(source, payload, hop, piece)
            if sequence >= stream.next_sequence:
                self._keep_early(name, stream, sequence, message, signature)
            elif sequence in stream.pending:
                self._deliver(stream, sequence, message, signature)
                self._finish_if_done(stream, sequence)
        elif kind is Kind.ASK:
            self._answer(stream, source, sequence, name, signature)
        elif kind is Kind.JOINED and sequence in stream.pending:
            self._note_joined(stream, sequence, source)
            self._finish_if_done(stream, sequence)
        elif kind is Kind.STREAM_FAILED:
            self._hear_failure(stream, source, payload)
        elif kind is Kind.ABANDON:
            stream.abandoned_from[source] = sequence
            stream.reasons[source] = str(framing.unpack_json(payload).get("reason", ""))[:_REASON_LENGTH]
            self._fail_without_departed(name, stream)
        self._send_for_relief()

    def peer_lost(self, rank: int, reason: str) -> None:
        """Fails everything: a group that lost a task is not a group any more."""
        self._lost = self._lost or (rank, reason)
        peer = self._task_names[rank]
        self.last_failure = errors.PeerLostError(
            f"{self._task_names[self._rank]} lost {peer} ({reason}).", task=peer
        )
        self._fail_all(lambda operation: operation.lost_error(rank, reason))

    def peer_left(self, rank: int, farewell: Mapping[str, Any]) -> None:
        """Fails only what still needs the peer."""
        streams = farewell.get("streams")
        streams = streams if isinstance(streams, dict) else {}
        self._left[rank] = {name: count for name, count in streams.items() if isinstance(count, int)}
        for name, stream in self._streams.items():
            self._fail_without_departed(name, stream)
        self._send_for_relief()

    def farewell(self) -> dict[str, Any]:
        """How far this task came in every stream; sends what waits, since a task that leaves waits for nobody."""
        for stream in self._streams.values():
            for sequence, operation in stream.pending.items():
                self._send(operation, sequence, operation.outbox.empty())
        return {"streams": {name: stream.first_incomplete for name, stream in self._streams.items()}}

    def tick(self) -> float:
        """Looks for operations that take long."""
        is_waiting = False
        for stream in self._streams.values():
            for sequence, operation in list(stream.pending.items()):
                is_waiting = True
                waited = operation.waited_seconds
                if waited >= operation.timeout_seconds and sequence in stream.pending:
                    error = operation.timeout_error(waited)
                    self._fail_stream(stream, operation.stream, Failure(type(error), str(error), error.task))
                elif not operation.asked and waited >= min(_ASK_AFTER_SECONDS, operation.timeout_seconds / 4):
                    operation.asked = True
                    for rank in operation.missing:
                        self._mesh.send(rank, pack_body(Kind.ASK, 0, sequence, 0, operation.names))
        self._send_for_relief()
        return _TICK_SECONDS if is_waiting else 1.0

    def closed(self, error: Exception | None) -> None:
        """Fails what is pending, because nothing can be sent any more."""
        self._closed = self._closed or error or RuntimeError("The process group is closed.")
        text, me = str(self._closed), self._task_names[self._rank]
        self._fail_all(lambda operation: operation.error(errors.CollectiveError, text, me))

    # Parts of the above.

    def _peers(self) -> Iterable[int]:
        return (rank for rank in range(len(self._task_names)) if rank != self._rank)

    def _post(self, operation: Operation, sequence: int, messages: Iterable[Message]) -> None:
        ready, to_ask = operation.outbox.offer(messages)
        for rank in to_ask:
            self._mesh.send(rank, pack_body(Kind.ASK, 0, sequence, 0, operation.names))
        self._send(operation, sequence, ready)

    def _note_joined(self, stream: Stream, sequence: int, peer: int) -> None:
        operation = stream.pending[sequence]
        if peer not in operation.outbox.joined:
            self._send(operation, sequence, operation.outbox.peer_joined(peer))

    def _send_for_relief(self) -> None:
        """Sends what was held back from peers that have caught up, those operations first that came first."""
        while self._budget.relieved:
            peer = self._budget.relieved.pop()
            for stream in self._streams.values():
                for sequence, operation in list(stream.pending.items()):
                    self._send(operation, sequence, operation.outbox.retry(peer))
                    self._finish_if_done(stream, sequence)

    def _send(self, operation: Operation, sequence: int, messages: Iterable[Message]) -> None:
        for peer, payload, hop, piece, borrowed in messages:
            body = pack_body(Kind.DATA, hop, sequence, piece, operation.names)
            # bfloat16 arrays have no buffer protocol; bytes always do.
            data = payload if isinstance(payload, memoryview) else payload.view("uint8")
            tracker = self._mesh.send(peer, body, data, track=borrowed)
            if tracker is not None and borrowed:
                operation.trackers.append(tracker)

    def _deliver(self, stream: Stream, sequence: int, message: Message, signature: str) -> None:
        operation = stream.pending[sequence]
        if signature != operation.signature:
            self._fail_on_mismatch(stream, sequence, message.peer, signature)
            return
        try:
            replies = operation.machine.receive(message)
        except ProtocolViolation as violation:
            peer = self._task_names[message.peer]
            failure = Failure(
                errors.CollectiveError, f"{peer} sent {violation} in {operation.signature}.", peer
            )
            self._fail_stream(stream, operation.stream, failure)
            return
        self._note_joined(stream, sequence, message.peer)
        self._post(operation, sequence, replies)

    def _finish_if_done(self, stream: Stream, sequence: int) -> None:
        operation = stream.pending.get(sequence)
        if operation is not None and operation.is_over:
            del stream.pending[sequence]
            operation.outbox.close()
            operation.future.set_result(operation.machine.result(), operation.trackers)

    def _keep_early(self, name: str, stream: Stream, sequence: int, message: Message, signature: str) -> None:
        self._early_bytes += memoryview(message.payload).nbytes
        stream.early.setdefault(sequence, []).append((message, signature))
        if self._early_bytes > self._early_limit_bytes:
            peer, me = self._task_names[message.peer], self._task_names[self._rank]
            text = (
                f"{peer} is so far ahead of {me} in stream {name!r} that {self._early_bytes} bytes wait here, "
                f"more than the limit of {self._early_limit_bytes} bytes."
            )
            self._fail_stream(stream, name, Failure(errors.CollectiveError, text, peer))

    def _answer(self, stream: Stream, source: int, sequence: int, name: str, signature: str) -> None:
        if sequence >= stream.next_sequence:
            stream.askers.setdefault(sequence, set()).add(source)
            return
        operation = stream.pending.get(sequence)
        if operation is not None and operation.signature != signature:
            self._fail_on_mismatch(stream, sequence, source, signature)
            return
        if operation is not None:
            self._note_joined(stream, sequence, source)
            self._finish_if_done(stream, sequence)
        self._mesh.send(source, pack_body(Kind.JOINED, 0, sequence, 0, pack_names(name, signature)))

    def _fail_on_mismatch(self, stream: Stream, sequence: int, peer: int, signature: str) -> None:
        operation = stream.pending[sequence]
        text = operation.mismatch_text(peer, signature, sequence)
        failure = Failure(errors.SignatureMismatchError, text, self._task_names[peer])
        self._fail_stream(stream, operation.stream, failure)

    def _hear_failure(self, stream: Stream, source: int, payload: memoryview) -> None:
        fields = framing.unpack_json(payload)
        error_class = _STREAM_ERRORS.get(str(fields.get("error")), errors.CollectiveError)
        text = f"{self._task_names[source]} reports: {str(fields.get('text'))[:4000]}"
        # For the one that was blamed, the other side of the mismatch is the one that reports it.
        task = str(fields.get("task"))[:200]
        task = self._task_names[source] if task == self._task_names[self._rank] else task
        self._fail_stream(stream, "", Failure(error_class, text, task), tell=False)

    def _fail_stream(self, stream: Stream, name: str, failure: Failure, *, tell: bool = True) -> None:
        if stream.failure is not None:
            return
        stream.failure = failure
        if tell:
            fields = {"error": failure.error_class.__name__, "text": failure.text, "task": failure.task}
            payload = memoryview(framing.pack_json(fields))
            for rank in self._peers():
                self._mesh.send(rank, pack_body(Kind.STREAM_FAILED, 0, 0, 0, pack_names(name, "")), payload)
        pending, stream.pending = stream.pending, {}
        for operation in pending.values():
            operation.outbox.close()
            error = operation.error(failure.error_class, failure.text, failure.task)
            self._record(error)
            operation.future.set_error(error)
        self._forget_early(stream)

    def _fail_without_departed(self, name: str, stream: Stream) -> None:
        """Fails the operations that need a task which left the group or the stream."""
        for sequence, operation in list(stream.pending.items()):
            for rank in sorted(operation.missing):
                error: errors.CollectiveError
                if sequence >= stream.abandoned_from.get(rank, sequence + 1):
                    error = operation.abandoned_error(rank, stream.reasons.get(rank, ""))
                elif rank in self._left and sequence >= self._left[rank].get(name, 0):
                    error = operation.left_error(rank)
                else:
                    continue
                del stream.pending[sequence]
                operation.outbox.close()
                self._record(error)
                operation.future.set_error(error)
                break

    def _fail_all(self, make_error) -> None:
        for stream in self._streams.values():
            pending, stream.pending = stream.pending, {}
            for operation in pending.values():
                error = make_error(operation)
                if self._closed is None:
                    self._record(error)
                operation.future.set_error(error)
            self._forget_early(stream)

    def _record(self, error: Exception) -> None:
        # That a stream is not read any more is news to its readers alone.
        if isinstance(error, StreamAbandoned) or self._closed is not None:
            return
        if isinstance(error, errors.CollectiveError):
            self.last_failure = error

    def _forget_early(self, stream: Stream) -> None:
        self._early_bytes -= stream.forget_early()
