"""Remote calls: a method of an interface, with words and named arrays one way and back.

An interface is a class whose public methods are the calls that travel (`ServerCalls`,
`WorkerCalls`, `HostCalls`, `WeightCalls`). Who calls passes the method itself, so that mypy checks
its arguments and an editor finds it; its name and arguments travel as JSON and arrays. Who answers
has an object of a class that implements the interface. An error of a call is raised where the call
was made; the connection goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.coroutines import NotReady
from runtime.hosts.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    error_document,
    error_from,
    pack_json,
    unpack_json,
)
from runtime.hosts.wire.segments import Segment, pack_arrays, unpack_arrays
from runtime.stop import RunStopped

Payload = dict[str, Any]
"""By name, what is plain JSON and what is an array."""
P = ParamSpec("P")
R = TypeVar("R", bound=Mapping[str, Any] | None)
Method = Callable[Concatenate[Any, P], R]
"""A method of an interface: it takes words and arrays by name, and returns such, or None."""


def send_payload(send: Callable[..., None], message: Message, payload: Mapping[str, Any]) -> None:
    """Send a message with this payload by ``send``; its arrays come along in a segment."""
    arrays = {name: value for name, value in payload.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in payload.items() if name not in arrays}
    if not arrays:
        return send(message._replace(body=pack_json(plain)))
    document, segment = pack_arrays(arrays)  # it goes when it has been sent
    send(message._replace(body=pack_json(plain | document)), segment=segment)


def payload_of(message: Message, segment: Segment | None) -> Payload:
    """The payload of a message. Raises BadMessageError."""
    payload = unpack_json(message.body)
    if segment is None:
        return payload
    plain = {name: payload[name] for name in payload if name != "index"}
    return plain | unpack_arrays(payload, segment)


def send_call(
    send: Callable[..., None], message: Message, method: Callable[..., Any], arguments: Payload
) -> None:
    """Send a call of a method of an interface with these arguments, by ``send``."""
    send_payload(send, message, {**arguments, "method": method.__name__})


def call(
    channel: Channel,
    method: Method[P, R],
    check: Callable[[], None],
    where: str = "",
    /,
    *args: P.args,
    **arguments: P.kwargs,
) -> R:
    """Call a method at the other end and wait for its result; ``check`` as for `Channel.receive`.

    Raises what the other side failed with, and ``where``; PeerGoneError, TimeoutError when nothing
    is taken there.
    """
    assert not args, "arguments travel by name"
    send_call(channel.send, Message(MessageKind.CALL), method, dict(arguments))
    message, segment = channel.receive(check)
    payload = payload_of(message, segment)
    if message.kind is MessageKind.FAILED:
        raise error_from(payload, f" ({where})" if where else "")
    return cast(R, payload)


def answer(
    channel: Channel, message: Message, segment: Segment | None, interface: type, service: Any
) -> None:
    """Do what a CALL asks of the ``service``, and send the result under the number of the CALL.

    Only methods of the ``interface`` are called. Raises BadMessageError for what is no call,
    NotReady, RunStopped, and PeerGoneError.
    """
    reply(channel, message, asked_of(message, segment, interface, service))


def asked_of(
    message: Message, segment: Segment | None, interface: type, service: Any
) -> partial[Any]:
    """What a CALL asks of the ``service``: a method, with arguments. Raises BadMessageError."""
    # Which method it is: nothing that the interface does not declare can be reached.
    if message.kind is not MessageKind.CALL:
        raise BadMessageError(f"a {message.kind.name} is no call")
    arguments = payload_of(message, segment)
    methods = methods_of(interface)
    name = str(arguments.pop("method", None))
    if name not in methods:
        raise BadMessageError(f"a call is one of {', '.join(methods)}")
    return partial(getattr(service, name), **arguments)


def reply(
    channel: Channel, message: Message, asked: Callable[[], Mapping[str, Any] | None]
) -> None:
    """Do what was asked, and send the result under the number of the CALL; an error, too, but for
    those by which this end waits or stops, which are raised."""
    try:
        result = asked()
    except (PeerGoneError, BadMessageError, NotReady, RunStopped):
        raise
    except Exception as error:
        return send_error(channel, error, message)
    send_payload(channel.send, Message(MessageKind.RESULT, number=message.number), result or {})


def methods_of(interface: type) -> list[str]:
    """The names of the calls that an interface declares."""
    return [name for name in vars(interface) if not name.startswith("_")]


_EVERY_CALL = Message(MessageKind.CALL)


def send_error(
    channel: Channel, error: BaseException | None, request: Message = _EVERY_CALL
) -> None:
    """Send what went wrong, with all or with one ``request``; None: the run has stopped."""
    body = pack_json(error_document(error or RunStopped("stopped")))
    with suppress(PeerGoneError, TimeoutError):  # nobody is there to receive it
        channel.send(request._replace(kind=MessageKind.FAILED, body=body), within_s=1.0)


def close_channel(channel: Channel, within_s: float = 1.0) -> None:
    """Tell the other end, which may have gone first, that all is well, and close."""
    with suppress(PeerGoneError, TimeoutError):
        channel.send(Message(MessageKind.DISCONNECT), within_s=within_s)
    channel.close()
