"""Canonical bytes and digests: equal inputs give equal ids on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any

DIGEST_LENGTH = 12  # hexadecimal digits shown in directory names: 48 bits, plenty for the releases of one box


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, two-space indent and a final newline. Raises TypeError for what JSON cannot hold."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def short_digest(value: Any) -> str:
    """The first DIGEST_LENGTH hexadecimal digits of the sha256 of the canonical JSON of `value`."""
    return sha256_hex(canonical_json(value))[:DIGEST_LENGTH]
