"""One struct and some descriptors as one packet of a unix SOCK_SEQPACKET pair.

Packet: 1 byte form, then the msgpack body (form 0), or nothing (form 1): then the body lies in a
memfd, the last of the descriptors, since a packet larger than the socket buffer cannot be sent.
Knows neither side and no message.
"""

from __future__ import annotations

import array
import os
import socket
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from flodl_shm.errors import HostUnfit, PeerBroke, WeBroke

if TYPE_CHECKING:
    from collections.abc import Sequence

INLINE_BYTES: Final = 32 * 1024  # the smallest buffer Linux hands out (wmem_min aside) holds this
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
MAX_FDS: Final = 250  # SCM_MAX_FD is 253; one may be the memfd

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    """Send one packet. Raises BlockingIOError, BrokenPipeError or ConnectionError as send does."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES or len(fds) > MAX_FDS:
        raise WeBroke(f"a packet of {len(body)} bytes and {len(fds)} descriptors is too much")
    if len(body) <= INLINE_BYTES:
        socket.send_fds(sock, [b"\0" + body], list(fds))
        return
    memfd = os.memfd_create("flodl-parcel")
    try:
        with os.fdopen(os.dup(memfd), "wb") as file:
            file.write(body)
        socket.send_fds(sock, [b"\1"], [*fds, memfd])
    finally:
        os.close(memfd)


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> tuple[T, list[int]] | None:
    """The next packet and its descriptors (ours to close); None when the other side is gone.

    Raises BlockingIOError when there is none yet, PeerBroke for anything that is no packet of
    ours, HostUnfit when the kernel dropped descriptors because this process may open no more.
    """
    try:
        # Not socket.recv_fds: it drops its flags, and the descriptors would survive an exec.
        room = socket.CMSG_SPACE((MAX_FDS + 1) * array.array("i").itemsize)
        data, ancillary, flags, _ = sock.recvmsg(INLINE_BYTES + 16, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    fds = _descriptors(ancillary)
    try:
        if flags & socket.MSG_CTRUNC:
            raise _no_descriptors()
        if not data:
            return None
        body = _body(data, fds)
        return decoder.decode(body), fds
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, msgspec.MsgspecError):
            raise PeerBroke(f"a packet between launcher and fork server: {error}") from error
        raise


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _body(data: bytes, fds: list[int]) -> bytes:
    if data[:1] == b"\0":
        return data[1:]
    if data[:1] != b"\1" or not fds:
        raise PeerBroke(f"a packet between launcher and fork server of form {data[:1]!r}")
    with os.fdopen(fds.pop(), "rb") as file:
        file.seek(0)
        return file.read(MAX_BODY_BYTES)


def _no_descriptors() -> HostUnfit:
    return HostUnfit(
        "this process may not open more files, so a descriptor got lost",
        hint="raise the limit with ulimit -n",
    )
