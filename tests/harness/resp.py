"""Cut a stream of the Redis protocol (RESP2 and RESP3) into its top-level messages."""

from __future__ import annotations

_BLOBS = b"$!="  # a length, then that many bytes and a line end
_AGGREGATES = {
    ord("*"): 1,
    ord("~"): 1,
    ord(">"): 1,
    ord("%"): 2,
    ord("|"): 2,
}  # elements for each one counted
_ATTRIBUTE = ord("|")  # does not stand for itself: the value it describes follows


class Splitter:
    """Bytes in, whole messages out, whatever the pieces they arrive in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes."""
        self._buffer += data
        messages = []
        while end := self._end_of_message():
            messages.append(bytes(self._buffer[:end]))
            del self._buffer[:end]
        return messages

    def _end_of_message(self) -> int:
        """How long the first message is, or 0 while it is incomplete."""
        position, missing = 0, 1
        while missing:
            line_end = self._buffer.find(b"\r\n", position)
            if line_end < 0:
                return 0
            kind, number = self._buffer[position], bytes(self._buffer[position + 1 : line_end])
            position, missing = line_end + 2, missing - 1
            if kind in _BLOBS and number != b"-1":
                position += int(number) + 2
            elif kind in _AGGREGATES and number != b"-1":
                missing += int(number) * _AGGREGATES[kind] + (kind == _ATTRIBUTE)
        return position if position <= len(self._buffer) else 0


def command_name(message: bytes) -> bytes:
    """The command a client's message asks for, in upper case: ``b"EVALSHA"``."""
    lines = message.split(b"\r\n", 3)
    word = lines[2] if message.startswith(b"*") else lines[0].partition(b" ")[0]
    return word.upper()


def is_push(message: bytes) -> bool:
    """Whether the server sent this message unasked: it answers no command."""
    return message.startswith(b">")
