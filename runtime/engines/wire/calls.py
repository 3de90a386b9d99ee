"""Requests with a verb: words and named arrays one way, words and named arrays back.

So embedding servers are asked for what is rare, the host that starts them for all, and rank 0 for
the dense weights that it keeps. An error of a request is told to who asked; the connection goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from runtime.engines.wire.channel import Channel
from runtime.engines.wire.connection import PeerGoneError
from runtime.engines.wire.coroutines import LaterError
from runtime.engines.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    error_document,
    error_from,
    pack_json,
    unpack_json,
)
from runtime.engines.wire.segments import Segment, pack_arrays, unpack_arrays
from runtime.stop import RunStopped

Said = dict[str, Any]
"""By name, what is plain JSON and what is an array."""
Verbs = Mapping[str, Callable[..., Mapping[str, Any] | None]]
"""What may be asked for; each is given what was said, by name, and gives what is answered."""


def send_said(send: Callable[..., None], message: Message, said: Mapping[str, Any]) -> None:
    """Send a message that says this by ``send``; arrays lie in a segment that comes with it."""
    arrays = {name: value for name, value in said.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in said.items() if name not in arrays}
    if not arrays:
        return send(message._replace(body=pack_json(plain)))
    document, segment = pack_arrays(arrays)  # it goes when it has been sent
    send(message._replace(body=pack_json(plain | document)), segment=segment)


def said_in(message: Message, segment: Segment | None) -> Said:
    """What a message says. Raises BadMessageError."""
    said = unpack_json(message.body)
    if segment is None:
        return said
    return {name: said[name] for name in said if name != "index"} | unpack_arrays(said, segment)


def answer(channel: Channel, message: Message, segment: Segment | None, verbs: Verbs) -> None:
    """Do what a CALL asks for, and say what came of it, under the number of the CALL.

    Raises BadMessageError for what is no request, LaterError, RunStopped, and PeerGoneError.
    """
    if message.kind is not MessageKind.CALL:
        raise BadMessageError(f"a {message.kind.name} is no rare request")
    asked = said_in(message, segment)
    verb = verbs.get(str(asked.pop("verb", None)))
    if verb is None:
        raise BadMessageError(f"a rare request is one of {', '.join(verbs)}")
    try:
        found = verb(**asked)
    except (PeerGoneError, BadMessageError, LaterError, RunStopped):
        raise
    except Exception as error:
        return tell(channel, error, message)
    send_said(channel.send, Message(MessageKind.RESULT, number=message.number), found or {})


_ALL_ASKED = Message(MessageKind.CALL)


def tell(channel: Channel, error: BaseException | None, asked: Message = _ALL_ASKED) -> None:
    """Say what went wrong, with all or with what was ``asked``; None: the run has stopped."""
    body = pack_json(error_document(error or RunStopped("stopped")))
    with suppress(PeerGoneError, TimeoutError):  # nobody is there to be told
        channel.send(asked._replace(kind=MessageKind.FAILED, body=body), within_s=1.0)


def goodbye(channel: Channel, within_s: float = 1.0) -> None:
    """Say that all is well, to who may have gone first, and close."""
    with suppress(PeerGoneError, TimeoutError):
        channel.send(Message(MessageKind.GOODBYE), within_s=within_s)
    channel.close()


def ask(
    channel: Channel, verb: str, goes_on: Callable[[], None], where: str = "", **asked: Any
) -> Said:
    """Ask, and wait for the answer; ``goes_on`` as for `Channel.receive`.

    Raises what the other side failed with, and ``where``; PeerGoneError, TimeoutError when nothing
    is taken there.
    """
    send_said(channel.send, Message(MessageKind.CALL), {**asked, "verb": verb})
    message, segment = channel.receive(goes_on)
    said = said_in(message, segment)
    if message.kind is MessageKind.FAILED:
        raise error_from(said, f" ({where})" if where else "")
    return said
