"""What a message looks like inside of a ring: one frame, or several that are its pieces."""

from __future__ import annotations

import struct
from dataclasses import dataclass

#   0        4        8                 16        20        24
#   +--------+--------+-----------------+---------+---------+------------+---------+
#   | length | kind   | sequence        | crc32   | crc32   | body       | pad to  |
#   | u32    | u32    | u64             | of body | of 0:20 | length     | 8 bytes |
#   +--------+--------+-----------------+---------+---------+------------+---------+
# The sequence is the position of the frame since the beginning of the ring: it grows with each
# frame, and the frame of an older lap at the same place cannot pass for this one.
FRAME = struct.Struct("<IIQII")
HEAD = struct.Struct("<IIQI")  # the part of it that its own checksum covers
CHECKED = HEAD.size
pack_head = HEAD.pack
pack_checksum = struct.Struct("<I").pack
FRAME_BYTES = FRAME.size

WHOLE, FIRST, PIECE, LAST = 1, 2, 3, 4
KINDS = {WHOLE: "whole", FIRST: "first piece", PIECE: "piece", LAST: "last piece"}


def span(body_bytes: int) -> int:
    """Return the bytes a frame takes in the ring: header, body, padding to a whole word."""
    return FRAME_BYTES + (body_bytes + 7 & ~7)


@dataclass(frozen=True, slots=True)
class BadFrame:
    """A message that did not come through. Later ones do."""

    peer: str
    sequence: int
    kind: int
    body_bytes: int
    why: str

    def sentence(self) -> str:
        """Say what was lost, in words for a log line."""
        return (
            f"dropped a message from {self.peer}: {self.why} "
            f"({KINDS[self.kind]} of {self.body_bytes} bytes at {self.sequence})"
        )
