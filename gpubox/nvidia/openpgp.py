"""The fingerprint of a public key file, without GnuPG: enough of OpenPGP (RFC 4880, RFC 9580) to know whose key it is.

apt trusts every key in the file that it is given, so a file is accepted only when it holds one key, the wanted one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator

from gpubox.errors import InputError

_ARMOR = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----[ \t]*\r?\n(?:[^\r\n]+\r?\n)*[ \t]*\r?\n(?P<body>.*?)"
    rb"-----END PGP PUBLIC KEY BLOCK-----",
    re.DOTALL,
)
_PUBLIC_KEY = 6


def fingerprints(data: bytes, origin: str) -> list[str]:
    """Fingerprints (40 or 64 upper-case hex digits) of the primary keys in `data`, armored or binary, in order.

    Raises InputError naming `origin` when that is not a file of public keys.
    """
    found = [_fingerprint(body, origin) for tag, body in _packets(_binary(data, origin), origin) if tag == _PUBLIC_KEY]
    if not found:
        raise InputError(
            f"{origin}: no public key in it", hint="the file that the repository offers as its key: .pub, .asc, .gpg"
        )
    return found


def armored(data: bytes, origin: str) -> str:
    """The same keys as ASCII armor, as apt wants them in a file named .asc. Raises InputError."""
    binary = _binary(data, origin)
    text = base64.b64encode(binary).decode()
    lines = "\n".join(text[start : start + 64] for start in range(0, len(text), 64))
    checksum = base64.b64encode(_crc24(binary).to_bytes(3, "big")).decode()
    return f"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n{lines}\n={checksum}\n-----END PGP PUBLIC KEY BLOCK-----\n"


def _crc24(data: bytes) -> int:
    """RFC 9580 no longer wants it; GnuPG 2.2 takes some armor without it for damaged."""
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc = (crc << 1) ^ (0x1864CFB if crc & 0x800000 else 0)
    return crc & 0xFFFFFF


def _binary(data: bytes, origin: str) -> bytes:
    if data[:1] and data[0] & 0x80:
        return data
    blocks = list(_ARMOR.finditer(data))
    if not blocks:
        raise InputError(
            f"{origin}: not an OpenPGP key", hint="an armored file begins with -----BEGIN PGP PUBLIC KEY BLOCK-----"
        )
    try:
        return b"".join(_dearmored(block["body"]) for block in blocks)
    except binascii.Error as error:
        raise _damaged(origin, f"its base64 does not decode ({error})") from None


def _dearmored(body: bytes) -> bytes:
    """Without the checksum, which is a line that begins with '='."""
    lines = [line.strip() for line in body.splitlines()]
    return base64.b64decode(b"".join(line for line in lines if not line.startswith(b"=")), validate=True)


def _packets(data: bytes, origin: str) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        tag, start, length = _header(data, position, origin)
        position = start + length
        if position > len(data):
            raise _damaged(origin, "it ends in the middle of a packet")
        yield tag, data[start:position]


def _header(data: bytes, position: int, origin: str) -> tuple[int, int, int]:
    """Tag of the packet at `position`, where its body begins, and how long that is."""
    first = data[position]
    if not first & 0x80:
        raise _damaged(origin, "a packet does not begin where the one before ends")
    if first & 0x40:
        tag, sizes = first & 0x3F, _new_length(data, position + 1)
    else:
        tag, sizes = (first >> 2) & 0x0F, _old_length(data, position + 1, first & 3)
    if sizes is None:
        raise _damaged(origin, "a packet has no definite length, as keys have")
    size, length = sizes
    return tag, position + 1 + size, length


def _old_length(data: bytes, position: int, kind: int) -> tuple[int, int] | None:
    if kind == 3:
        return None
    size = 1 << kind
    return size, int.from_bytes(data[position : position + size], "big")


def _new_length(data: bytes, position: int) -> tuple[int, int] | None:
    first = data[position] if position < len(data) else 0
    if first < 192:
        return 1, first
    if first < 224:
        return 2, ((first - 192) << 8) + int.from_bytes(data[position + 1 : position + 2], "big") + 192
    if first == 255:
        return 5, int.from_bytes(data[position + 1 : position + 5], "big")
    return None


def _fingerprint(body: bytes, origin: str) -> str:
    version = body[0] if body else 0
    if version == 4:
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    if version == 6:
        return hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    raise InputError(f"{origin}: a key of version {version}", hint="versions 4 and 6 are supported")


def _damaged(origin: str, what: str) -> InputError:
    return InputError(f"{origin}: a damaged OpenPGP key: {what}", hint="fetch the file again")
