"""Which parameters a command has, what their values may be, and PVE's words for a value that is not allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Interface, ip_address


class Invalid(Exception):
    """A value that a format does not allow; the words are PVE's."""


@dataclass(frozen=True)
class Parameter:
    """One parameter, or one key of a property string. `check` raises Invalid. A default key needs no `KEY=`."""

    kind: str = "string"  # string, boolean, integer, number
    optional: bool = True
    check: Callable[[str], object] | None = None
    keys: Mapping[str, Parameter] | None = None  # the value is a property string
    pattern: str | None = None
    minimum: int | None = None
    maximum: int | None = None
    max_length: int | None = None
    enum: tuple[str, ...] = ()
    default_key: bool = False
    is_list: bool = False

    def errors(self, path: str, value: str) -> dict[str, str]:
        """What is wrong with `value`, by path ("dev0", "dev0.mode"). Empty when it is allowed."""
        wrong = self._wrong_type(value) or self._wrong_string(value) or self._out_of_range(value)
        if wrong:
            return {path: wrong}
        if self.enum and value not in self.enum:
            return {path: f"value '{value}' does not have a value in the enumeration '{', '.join(self.enum)}'"}
        return {}

    def _wrong_type(self, value: str) -> str:
        pattern = {"integer": r"[+-]?\d+", "number": r"[+-]?\d+(\.\d+)?", "boolean": r"[01]"}.get(self.kind)
        if pattern is None or re.fullmatch(pattern, value):
            return ""
        return f"type check ('{self.kind}') failed - got '{value}'"

    def _wrong_string(self, value: str) -> str:
        if self.kind in ("string", "integer") and self.check is not None:
            try:
                self.check(value)
            except Invalid as error:
                return f"invalid format - {error}\n"
        if self.kind != "string":
            return ""
        if self.keys is not None:
            try:
                parse_property_string(self.keys, value)
            except Invalid as error:
                return f"invalid format - {error}\n"
        if self.pattern is not None and not re.fullmatch(self.pattern, value):
            return "value does not match the regex pattern"
        if self.max_length is not None and len(value) > self.max_length:
            return f"value may only be {self.max_length} characters long"
        return ""

    def _out_of_range(self, value: str) -> str:
        if self.kind not in ("integer", "number"):
            return ""
        if self.maximum is not None and float(value) > self.maximum:
            return f"value must have a maximum value of {self.maximum}"
        if self.minimum is not None and float(value) < self.minimum:
            return f"value must have a minimum value of {self.minimum}"
        return ""


def parse_boolean(value: str) -> str | None:
    """ "1", "0", or None for what PVE does not take for a boolean."""
    if re.fullmatch("1|on|yes|true", value, re.IGNORECASE):
        return "1"
    if re.fullmatch("0|off|no|false", value, re.IGNORECASE):
        return "0"
    return None


def parse_property_string(keys: Mapping[str, Parameter], text: str) -> dict[str, str]:
    """`/dev/nvidia0,mode=0666` as {"path": ..., "mode": ...}. Raises Invalid."""
    default = next((name for name, key in keys.items() if key.default_key), None)
    found: dict[str, str] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals:
            if default is None:
                raise Invalid("value without key, but schema does not define a default key")
            name, value = default, part
        elif not name or not value:
            raise Invalid("missing key in comma-separated list property")
        if name in found:
            raise Invalid(f"duplicate key in comma-separated list property: {name}")
        if name not in keys:
            raise Invalid(f"invalid key in comma-separated list property: {name}")
        found[name] = (parse_boolean(value) or value) if keys[name].kind == "boolean" else value
    wrong = object_errors(keys, found)
    if wrong:
        raise Invalid("format error\n" + "\n".join(f"{name}: {message}" for name, message in wrong.items()))
    return found


def print_property_string(keys: Mapping[str, Parameter], values: Mapping[str, str]) -> str:
    """As PVE writes it: the default key first and bare, then those that must be there, then the others, by name."""
    default = [values[name] for name, key in keys.items() if key.default_key and name in values]
    others = [name for name in sorted(values) if name in keys and not keys[name].default_key]
    ordered = sorted(others, key=lambda name: keys[name].optional)
    return ",".join([*default, *(f"{name}={values[name]}" for name in ordered)])


def object_errors(parameters: Mapping[str, Parameter], values: Mapping[str, str]) -> dict[str, str]:
    wrong: dict[str, str] = {}
    for name, parameter in parameters.items():
        if name in values:
            wrong |= parameter.errors(name, values[name])
        elif not parameter.optional:
            wrong[name] = "property is missing and it is not optional"
    return wrong


def matches(pattern: str, message: str) -> Callable[[str], object]:
    """A check that refuses what does not match the whole `pattern`."""

    def check(value: str) -> None:
        if not re.fullmatch(pattern, value):
            raise Invalid(message.format(value=value))

    return check


def each(check: Callable[[str], object]) -> Callable[[str], object]:
    """The check of a list with blanks, commas or semicolons between its items."""

    def check_all(value: str) -> None:
        for item in filter(None, re.split(r"[,;\s\0]+", value)):
            check(item)

    return check_all


def ipv4_config(value: str) -> None:
    if value in ("dhcp", "manual"):
        return
    try:
        if "/" not in value or not 8 <= IPv4Interface(value).network.prefixlen <= 32:
            raise ValueError
    except ValueError:
        raise Invalid("value does not look like a valid ipv4 network configuration") from None


def ipv4(value: str) -> None:
    try:
        IPv4Address(value)
    except AddressValueError:
        raise Invalid("value does not look like a valid IPv4 address") from None


def any_ip(value: str) -> None:
    try:
        ip_address(value)
    except ValueError:
        raise Invalid("value does not look like a valid IP address") from None


def startup_order(value: str) -> dict[str, int]:
    """`order=1,up=10,down=120` in seconds. Raises Invalid."""
    found: dict[str, int] = {}
    for part in value.split(","):
        parsed = re.fullmatch(r"(?:(order|up|down)=)?(\d+)", part)
        if parsed is None:
            raise Invalid("unable to parse startup options")
        found[parsed[1] or "order"] = int(parsed[2])
    return found


def mount_source(value: str) -> None:
    if re.search(r"/\.\.?(/|$)|^\.\./", value):
        raise Invalid(f"{value} contains illegal character sequences")


def device_path(value: str) -> None:
    if re.search(r"/\.\.?(/|$)", value) or not value.startswith("/dev/"):
        raise Invalid(f"{value} is not a valid device path")


DNS_NAME = matches(
    r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?\.)*[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?",
    "value does not look like a valid DNS name",
)
DISK_SIZE = matches(r"\d+(\.\d+)?[KMGT]?", "value does not look like a valid disk size: {value}")
MAC = matches(r"[0-9a-fA-F][02468aceACE](:[0-9a-fA-F]{2}){5}", "value does not look like a valid unicast MAC address")
CONFIG_ID = matches(r"[a-zA-Z][a-zA-Z0-9_-]+", "invalid configuration ID '{value}'")
VMID = Parameter(
    "integer",
    optional=False,
    check=matches(r"[1-9][0-9]{2,8}", "value does not look like a valid VM ID"),
    minimum=100,
    maximum=999_999_999,
)
STORAGE_ID = matches(r"[a-zA-Z][a-zA-Z0-9._-]*[a-zA-Z0-9]", "storage ID '{value}' contains illegal characters")
