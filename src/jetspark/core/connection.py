"""The connection as a state machine: bytes and calls in, bytes and events out. No socket, no clock, no thread.

States, and who moves them::

    IDLE ──begin()──> GREETING ──INFO──> READY ──(TLS, secured())──login()──> LOGGING_IN ──PONG──> CONNECTED
      ^                                                                                                │
      └──────────────────────────────────── end(): the transport is gone ──────────────────────────────┘
    any ──close()──> CLOSED

Before CONNECTED the peer is not authenticated. A message is then a ``ProtocolError`` and reaches no subscription;
where TLS follows the greeting, so is any byte behind it (plain text that would count as part of the secure session),
and without TLS no login is sent. The limits and addresses of a greeting count once the session is established.

The driver dials (see :mod:`jetspark.core.lifecycle`), hands every received chunk to :meth:`Connection.receive_data`,
sends what :meth:`~Connection.data_to_send` returns, and acts on :meth:`~Connection.events`. An exception from
``receive_data`` or ``on_time`` means that the session is of no further use: the driver drops the transport and calls
``end``.

Subscriptions (sent again, with the rest of their message limit), publishes that were not yet handed to the driver,
and pending requests (their inbox stays the same) survive a session. Publishes that were handed over and not confirmed
by a PONG do not: ``Disconnected`` has their exact number, and a ``flush`` that waited for them fails with the same
number.

A server that announces its end (lame duck) is left in good order, if another one is known: see
:mod:`jetspark.core.confirmations`.

``handle`` arguments are the driver's (a future, a waiter); they come back in events and are never used here.
``reader`` arguments are woken by the dispatcher of the events: see :mod:`jetspark.core.machine`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, Unpack

from jetspark.core import frames
from jetspark.core.auth import Auth
from jetspark.core.confirmations import Claimant, DeniedPublishes, Leaving, Pings, SentPing
from jetspark.core.events import (
    Closed,
    Connected,
    Disconnected,
    ErrorReported,
    LameDuck,
    Reconnected,
    ReconnectFailed,
    ServersDiscovered,
)
from jetspark.core.handshake import Handshake, ServerInfo, is_about_credentials, parse_permission_denied
from jetspark.core.headers import HeadersLike
from jetspark.core.machine import Reader
from jetspark.core.message import CoreMessage
from jetspark.core.numbers import whole
from jetspark.core.options import ConnectOptions
from jetspark.core.outbox import Outbox
from jetspark.core.parser import Control, Info, Ping, Pong
from jetspark.core.reconnect import Server, ServerPool
from jetspark.core.requests import Names, Requests
from jetspark.core.subjects import check_line, validate_filter, validate_queue
from jetspark.core.subscription import (
    Done,
    Event,
    Failed,
    Ready,
    Subscriptions,
    SubscriptionState,
    SubscriptionTraits,
    pending_bounds,
)
from jetspark.core.tls import describe_error
from jetspark.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    JetSparkError,
    PayloadTooLarge,
    PermissionDenied,
    ProtocolError,
    ServerRefused,
)

__all__ = ["Connection", "Done", "Event", "Failed", "Ready", "State"]


class State(enum.Enum):
    IDLE = "idle"
    GREETING = "greeting"
    READY = "ready"
    LOGGING_IN = "logging in"
    CONNECTED = "connected"
    CLOSED = "closed"


class Connection(Outbox):
    """One logical connection, over as many sessions as it takes.

    It has these parts: :class:`Outbox` (messages to send), :class:`Subscriptions` (and arrived messages),
    :class:`Requests` (and their answers), :class:`Pings` (confirmations and liveness) and :class:`Names`. A session
    begins in :class:`Handshake`, and ends in :class:`Leaving` if there is time. This class has the session's states,
    and applies the server's commands to all parts.
    """

    def __init__(
        self,
        options: ConnectOptions,
        servers: Iterable[Server],
        *,
        inbox: str,
        jitter: Callable[[], float],
        message_class: type[CoreMessage] = CoreMessage,
        client: Any = None,
    ) -> None:
        """``inbox`` is a subject prefix no other connection has; ``jitter`` gives random numbers in [0, 1)."""
        self.info = ServerInfo()
        """The INFO of the present session's server, or of the last one's."""
        self.names = Names(inbox)
        self.requests = Requests(self.names)
        super().__init__(options.send_buffer_bytes, self.requests.prefix, self.info.max_payload_bytes)
        self.options = options
        self.pool = ServerPool(
            servers,
            wait_s=options.reconnect_wait_s,
            wait_max_s=options.reconnect_wait_max_s,
            max_attempts=options.max_reconnect_attempts,
            jitter=jitter,
        )
        self.state = State.IDLE
        self.server: Server | None = None
        self.handshake = Handshake()
        """The beginning of the present session, or of the last one."""
        self.sessions = 0
        """How many there have been, the present one included."""
        self.lost_messages = 0
        """Publishes that were unconfirmed when their session ended, of all sessions."""
        self.subscriptions = Subscriptions(message_class, client)
        """How much a driver reads at a time."""
        self._events: list[Event] = []
        self._login = b""
        self._pings = Pings(options.ping_interval_s, options.max_outstanding_pings)
        self._leaving = Leaving(self, self._pings, self.subscriptions)
        self.denials = DeniedPublishes()
        self._refused_publish: PermissionDenied | PayloadTooLarge | None = None
        self._last_complaint: ServerRefused | None = None
        self._has_reported_closed = False

    # ---- the session -------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self.state is State.CONNECTED

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def unconfirmed_messages(self) -> int:
        """Publishes handed to the network that the server has not confirmed by answering a later PING."""
        return self._handed_over - self._pings.confirmed

    @property
    def in_doubt(self) -> int:
        """Publishes that may or may not arrive: unconfirmed, or still buffered here."""
        return self.published - self._pings.confirmed

    def begin(self, server: Server, *, wants_tls: bool = False, is_secure: bool = False) -> None:
        """A transport to ``server`` is being opened; its greeting is expected.

        ``wants_tls`` requires TLS also of a server whose address does not; ``is_secure`` says that TLS comes first and
        the greeting over it.
        """
        assert self.state is State.IDLE, self.state
        self.state = State.GREETING
        self.server = server
        self.handshake = Handshake(wants_tls=wants_tls or server.requires_tls, is_secure=is_secure)
        self.subscriptions.begin_session()
        self._last_complaint = None

    def login(self, auth: Auth | None) -> None:
        """Answer the greeting. ``auth`` is used for this session only; it may be another one next time.

        Raises:
            ProtocolError: TLS is not on yet, and secrets are not sent in plain text.
        """
        assert self.state is State.READY, self.state
        assert self.server is not None
        self._login = self.handshake.login(self.server, auth, self.options)
        self.state = State.LOGGING_IN

    def receive_data(self, data: bytes) -> None:
        """Take a chunk from the transport.

        Raises:
            ProtocolError: The peer does not speak NATS.
            AuthenticationFailed: It does not accept us.
            ServerRefused: It ended the session for another reason.
        """
        if self.state is not State.CONNECTED:
            data = self._receive_before_session(data)
            if not data:
                return
        parser = self.subscriptions.parser
        try:
            parser.receive_data(data)
        finally:  # what came before the first bad byte is good
            if parser.touched:
                for subscription in parser.touched:
                    if subscription.arrived or subscription.answer_runs:
                        if subscription is self.requests.replies:
                            self.requests.take(self._events)
                        else:
                            self.subscriptions.deliver(subscription, self._events)
                parser.touched.clear()
        # Messages of a chunk before its control frames: a PONG that ends a drain, or a flush of a publisher's own
        # subscription, must find every message in front of it delivered. Finding those behind it too does no harm.
        if parser.control:
            control, parser.control = parser.control, []
            for frame in control:
                self._on_control(frame)

    def _receive_before_session(self, data: bytes) -> bytes:
        """Take the part of a chunk that comes before the session is established; returns the rest."""
        if self.state in (State.IDLE, State.CLOSED):
            return b""  # a late chunk of a session that is over
        # Another reader than the session's: see Handshake.
        handshake = self.handshake
        handshake.receive_data(data)
        while self.state is not State.CONNECTED:
            if self.state is State.READY and (rest := handshake.early_plain_text()):
                self.state = State.GREETING  # it never was a greeting to go on from
                raise ProtocolError(f"{len(rest)} bytes in plain text, where TLS must begin: {rest[:80]!r}")
            frame = handshake.next_frame()
            if frame is None:
                return b""
            self._on_control(frame)
        return handshake.take_rest()

    def end(self, reason: str) -> None:
        """The transport is gone. Safe to call in any state."""
        if self.state in (State.IDLE, State.CLOSED):
            return
        was_connected = self.is_connected
        self.state = State.IDLE
        self._login = b""
        self._pings.due = None
        if was_connected:
            # What the server said last explains more than "connection reset", which is how its hanging up looks here.
            self._end_session(self._last_complaint.text if self._last_complaint is not None else reason)

    def attempt_failed(self, server: Server, error: Exception, attempts: int) -> None:
        """An attempt to reconnect failed, and its owner should know."""
        if self.is_closed:
            return
        if not isinstance(error, JetSparkError):
            error = ConnectionLost(describe_error(error))
        self._events.append(ReconnectFailed(str(server), error, attempts))

    def _end_session(self, reason: str) -> None:
        complaint = self._last_complaint
        if complaint is not None and is_about_credentials(complaint.text):
            self.pool.refused_in_use(AuthenticationFailed(str(self.server), complaint.text))
        self._keep_messages()  # only these: subscriptions are sent again from their own table
        self._leaving.reset()
        unconfirmed = self.unconfirmed_messages
        self.lost_messages += unconfirmed
        # Counted as lost from here on. They are never sent again by themselves: the server may have them.
        confirmed, self._pings.confirmed = self._pings.confirmed, self._handed_over
        for ping in self._pings.take_all():
            if ping.draining is not None:  # nothing more will come: that is what draining waits for
                self.subscriptions.finish(ping.draining, self._events)
            if ping.handle is None:
                continue
            if ping.draining is not None:
                self._events.append(Done(ping.handle))
            elif unconfirmed and ping.published > confirmed:
                self._events.append(Failed(ping.handle, ConnectionLost(reason, unconfirmed)))
            else:  # all it waits for is still here, so it can wait for the next session
                self._pings.add(SentPing(ping.handle, self.published, error=ping.error))
        for subscription in [each for each in self.subscriptions.all if each.is_finished]:
            self.subscriptions.finish(subscription, self._events)  # an interrupt came between
        told = Disconnected(str(self.server), reason, unconfirmed, self.buffered_messages, self.published)
        self._events.append(told)

    def close(self, error: Exception | None = None) -> None:
        """End everything and fail all waiters. May be called again after an interrupt: the second call completes the
        first."""
        if self._has_reported_closed:
            return
        if error is not None:
            self._closed_because = f"the connection is closed: {error}"
        cause = error or ConnectionClosed("the connection was closed")
        self.state = State.CLOSED
        self._room_bytes = -1  # so that publish, which compares with it anyway, needs no second look
        self._login = b""
        self._pings.due = None
        self._events.extend(Failed(ping.handle, cause) for ping in self._pings if ping.handle is not None)
        self._pings.take_all()
        self.requests.fail_all(cause, self._events)
        for subscription in self.subscriptions.all:
            if error is not None:  # without one its owner closed the connection, and iteration just ends
                subscription.error = error
            self.subscriptions.finish(subscription, self._events)
        self._events.append(Closed(error, self.buffered_messages))
        self._has_reported_closed = True

    def disown(self, error: Exception) -> None:
        """End everything here: after a fork the connection, and the messages on their way, belong to another
        process."""
        self._handed_over = self._pings.confirmed = self.published
        self.close(error)
        self.events()

    def events(self) -> list[Event]:
        """Events since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def put_back(self, events: list[Event]) -> None:
        """Return events that could not all be delivered: an event may be delivered twice, but none is lost."""
        self._events[:0] = events

    def data_to_send(self) -> bytes:
        """Bytes for the transport; they count as handed over from here on."""
        if self.state is not State.CONNECTED:
            # Only the login: buffered data belong to the session, which begins when the server accepts us.
            data, self._login = self._login, b""
            return data
        return self._hand_over()

    def next_deadline(self) -> float | None:
        """When :meth:`on_time` wants to be called next; None while there is nothing to wait for."""
        due, goodbye_at = self._pings.due, self._leaving.next_deadline()
        if goodbye_at is not None:
            return goodbye_at if due is None else min(goodbye_at, due)
        return due

    def on_time(self, now: float) -> None:
        """Time has passed. Call it once after connecting too: that starts the clock.

        Raises:
            ConnectionLost: The server has left too many pings unanswered.
        """
        if not self.is_connected:
            return
        self._leaving.on_time(now)
        if self._pings.on_time(now):
            self._send_ping(SentPing(None, self.published, is_liveness=True))

    # ---- subscriptions, flushes, requests ----------------------------------------------------------------------

    def subscribe(
        self,
        subject: str,
        queue: str = "",
        *,
        max_pending_messages: int | None = None,
        max_pending_bytes: int | None = None,
        is_unbounded: bool = False,
        reader: Reader | None = None,
        **traits: Unpack[SubscriptionTraits],
    ) -> SubscriptionState:
        """Start receiving.

        Args:
            subject: What to receive; it may have wildcards.
            queue: Each message goes to one member of the queue group only.
            max_pending_messages: Bound of unread messages, instead of the connection's; see also
                ``max_pending_bytes``.
            is_unbounded: Nothing is dropped: its owner asks for no more than it can hold.
            reader: Woken when messages have arrived.
            traits: The use of the subscription.

        Raises:
            InvalidSubject: It cannot be subscribed to.
            BufferFull: The network takes nothing, and as many subscriptions as allowed wait for it.
        """
        validate_filter(subject)
        if queue:
            validate_queue(queue)
        check_line(f"{subject} {queue}" if queue else subject)
        bounds = pending_bounds(self.options, max_pending_messages, max_pending_bytes, is_unbounded=is_unbounded)
        self._check_open()
        self._check_control_room()
        subscription = SubscriptionState(
            self.subscriptions.new_sid(),
            subject,
            queue,
            max_pending_messages=bounds[0],
            max_pending_bytes=bounds[1],
            reader=reader,
            **traits,
        )
        self.subscriptions.add(subscription)
        self._send_control(frames.sub(subject, queue, subscription.sid))
        return subscription

    def unsubscribe(self, subscription: SubscriptionState, max_messages: int = 0) -> None:
        """End a subscription, at once or when it has received ``max_messages`` in all."""
        max_messages = whole("max_messages", max_messages, low=0)
        if subscription.is_finished:
            self.subscriptions.finish(subscription, self._events)  # what ended it may have been interrupted
            return
        if max_messages > subscription.received:
            self._check_control_room()  # a limit can be changed any number of times
        if 0 < subscription.max_messages < max_messages:
            # The server may have reached the old limit already and forgotten the subscription.
            raise ConfigError(
                f"max_messages={max_messages}: the limit is {subscription.max_messages} and can only be lowered"
            )
        subscription.max_messages = max_messages
        if max_messages > subscription.received:
            # The server counts from the SUB of this session, which may be younger than the subscription.
            self._send_control(frames.unsub(subscription.sid, max_messages - subscription.received_before))
        else:
            # First, so that the end of the session removes a finished subscription if an interrupt skips the rest.
            subscription.is_finished = True
            self._send_control(frames.unsub(subscription.sid))
            self.subscriptions.finish(subscription, self._events)

    def drain(self, subscription: SubscriptionState, handle: Any) -> None:
        """End a subscription without losing what the server has already sent; ``handle`` is Done when all arrived."""
        if subscription.is_finished or not self.is_connected:
            self.subscriptions.finish(subscription, self._events)  # without a session nothing is on its way
            self._events.append(Done(handle))
            return
        # The server answers in order: its PONG comes behind the last message it sent before it read the UNSUB.
        self._send_control(frames.unsub(subscription.sid))
        self._send_ping(SentPing(handle, self.published, draining=subscription))

    def flush(self, handle: Any) -> None:
        """``handle`` is Done when the server has processed everything published before this call."""
        self._check_open()
        self._check_control_room()
        self._send_ping(SentPing(handle, self.published))

    def forget_flush(self, handle: Any) -> None:
        """Drop the waiter of a flush, after a timeout or a cancellation."""
        self._pings.forget(handle, is_connected=self.is_connected)

    def request(self, handle: Any, subject: str, data: bytes, headers: HeadersLike | None) -> str:
        """Publish with a reply subject of our own; ``handle`` is Done with the first answer.

        Returns a token for :meth:`Requests.forget`, which the driver must call when it stops waiting.
        """
        requests = self.requests
        # One subscription with a wildcard for the answers to all requests: a SUB and an UNSUB for each would cost the
        # server, and every other node of its cluster, more than the request itself.
        if requests.replies is None:
            requests.replies = self._subscribe_to_replies()
        token = str(self.names.next_token())
        self.publish_with_reply(subject, (requests.prefix + token).encode(), data, headers)
        requests.add(token, handle, subject)  # after publishing: a refused publish leaves no waiter behind
        return token

    def _subscribe_to_replies(self) -> SubscriptionState:
        subject = self.requests.filter
        for abandoned in self.subscriptions.named(subject):
            self.unsubscribe(abandoned)  # of a request that was interrupted in here
        return self.subscribe(subject, is_unbounded=True, is_inbox=True)

    # ---- what the peer sends -----------------------------------------------------------------------------------

    def _on_control(self, frame: Control) -> None:
        if isinstance(frame, Ping):
            # PONGs have no bound of their own, since a caller does not make them: a server that only asks would fill
            # the memory.
            if self._control_bytes > self._control_room_bytes:
                raise ConnectionLost(f"the server sends PINGs and takes no answers: {self._control_bytes} bytes wait")
            self._send_control(frames.PONG)
        elif isinstance(frame, Pong):
            self._on_pong()
        elif isinstance(frame, Info):
            self._on_info(frame)
        else:
            self._on_error(frame.text)

    def _on_pong(self) -> None:
        if self.state is State.LOGGING_IN:
            self._on_connected()
            return
        ping = self._pings.on_pong() if self.state is State.CONNECTED else None
        if ping is None:
            return  # an unasked PONG is odd but harmless
        self._last_complaint = None  # the server answers, so its complaint did not end the session
        self.pool.proven()
        if ping.then:
            self._leaving.on_pong(ping)
        if ping.draining is not None:
            self.subscriptions.finish(ping.draining, self._events)
        if ping.handle is None:
            return
        if ping.error is not None:
            self._events.append(Failed(ping.handle, ping.error))
        elif self._refused_publish is not None and ping.draining is None:
            # A publish gets no answer of its own, so that its refusal is told by the flush behind it, once.
            self._events.append(Failed(ping.handle, self._refused_publish))
            self._refused_publish = None
        else:
            self._events.append(Done(ping.handle))

    def _on_connected(self) -> None:
        self.state = State.CONNECTED
        self.sessions += 1
        self._adopt_info(self.handshake.greeting)
        for subscription in [each for each in self.subscriptions.all if each.ends_with_session]:
            self.subscriptions.finish(subscription, self._events)
        # Before the messages that wait: the answer to one of them, or the message itself, may be for a subscription.
        self._send_first(self.subscriptions.restore())
        for ping in self._pings.take_all():
            ping.published = self.published  # all that is buffered goes out before it
            self._send_ping(ping)
        server = str(self.server)
        self._events.append(Connected(server) if self.sessions == 1 else Reconnected(server))
        self._events.extend(Ready(entry) for entry in self.subscriptions.all if entry.follows_sessions)

    def _on_info(self, frame: Info) -> None:
        try:
            info = ServerInfo.of(frame.fields)
        except (TypeError, ValueError, OverflowError) as error:
            raise ServerRefused(str(self.server), f"INFO we cannot read: {error}") from None
        if self.state is State.CONNECTED:
            was_lame_duck = self.info.is_lame_duck
            self._adopt_info(info)
            if info.is_lame_duck and not was_lame_duck:
                self._events.append(LameDuck(str(self.server)))
                if self.options.reconnect and self.pool.has_other_than(self.server):
                    self._leaving.begin()
            return
        self.handshake.greeting = info
        if self.state is State.GREETING:  # a second INFO before the PONG replaces the first, and nothing else
            self.state = State.READY
        if not self.handshake.awaits_tls:
            self._discover(info)  # also of a server that will refuse us: others of its cluster may not

    def _adopt_info(self, info: ServerInfo) -> None:
        """Adopt the limits and addresses of the session's server."""
        self.info = info
        for number, message in self._allow_payload(info.max_payload_bytes):
            self._on_dropped(message, number)
        self._discover(info)

    def _on_dropped(self, message: frames.Published, number: int) -> None:
        """Fail the flush or request that waits for message ``number``: it was dropped unsent."""
        error = PayloadTooLarge(message.size, self.info.max_payload_bytes, message.subject.decode(errors="replace"))
        self._events.append(ErrorReported(error))
        if not self.requests.fail_reply(message.reply, error, self._events) and not self._pings.fail_from(
            number, error
        ):
            self._refused_publish = self._refused_publish or error

    def _discover(self, info: ServerInfo) -> None:
        urls = info.fields.get("connect_urls")
        if not isinstance(urls, list) or self.options.ignore_discovered_servers:
            return
        server = self.server
        assert server is not None
        # The cluster announces bare addresses. They get the secrets and the TLS of the announcing server; otherwise a
        # reconnect would log in without credentials, or in plain text.
        new = self.pool.discovered(
            urls,
            requires_tls=info.requires_tls or server.requires_tls,
            auth=server.auth,
            tls_name=server.host if server.has_name else server.tls_name,
        )
        if new:
            self._events.append(ServersDiscovered(new))

    def _on_error(self, text: str) -> None:
        server = str(self.server)
        if self.state is not State.CONNECTED:
            # In plain text an attacker may have sent this, so it says nothing about our secrets.
            if is_about_credentials(text) and not self.handshake.may_be_forged:
                raise AuthenticationFailed(server, text)
            raise ServerRefused(server, text)
        denied = parse_permission_denied(text)
        if denied is not None:
            error, queue = denied
            self._on_permission_denied(error, queue)
            return
        # After some errors the server closes the connection; then this one is the reason to report.
        self._last_complaint = ServerRefused(server, text)
        self._events.append(ErrorReported(self._last_complaint))

    def _on_permission_denied(self, error: PermissionDenied, queue: str) -> None:
        subject = error.subject
        if error.operation == "publish":
            # The server names the subject, not the message: every request to it will stay unanswered.
            was_asked = self.requests.fail_subject(subject, error, self._events)
            asking = self.subscriptions.answering(subject)
            for subscription in asking:
                subscription.error = error
                self._send_control(frames.unsub(subscription.sid))
                self.subscriptions.finish(subscription, self._events)
            is_raised = self.denials.add(
                error,
                is_raised=was_asked or bool(asking),
                published=self.published,
                confirmed=self._pings.confirmed,
            )
            if is_raised:
                self._confirm()
            else:
                self._refused_publish = self._refused_publish or error
        else:
            is_raised = False  # a subscription with a callback has no caller to raise it to
            for subscription in self.subscriptions.named(subject, queue):
                subscription.error = error
                self.subscriptions.finish(subscription, self._events)
                if subscription is self.requests.replies:
                    self.requests.replies = None
                    is_raised = True
                    self.requests.fail_all(error, self._events)
        self._events.append(ErrorReported(error, is_raised=is_raised))

    def leave_denials(self, claimant: Claimant, count: int) -> None:
        """The claimant is over: it has raised the denials since the first ``count``, and raises no later ones."""
        if self.denials.leave(claimant, count, self.published) and self.is_connected:
            self._confirm()

    def _confirm(self) -> None:
        """Ask the server to confirm everything published so far, unless such a PING is on its way already."""
        if all(ping.published < self.published for ping in self._pings):
            self._send_ping(SentPing(None, self.published))

    def _send_control(self, frame: bytes) -> None:
        # Without a session nothing is sent: connecting sends the subscriptions that exist then.
        if self.state is State.CONNECTED:
            self._send_command(frame)

    def _send_ping(self, ping: SentPing) -> None:
        self._pings.add(ping)
        self._send_control(frames.PING)
