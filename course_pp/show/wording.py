"""Numbers and lists in sentences."""

from course_pp.schedule import Time


def counted(number: int, thing: str, things: str = "") -> str:
    """Return ``1 rank``, ``2 ranks``; ``things`` for a plural that is not formed with an s."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def listed(things: list[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(things[:-1]), *things[-1:]]))


def named(name: str, text: str) -> str:
    """Return ``1f1b: what follows``; ``What follows`` without a name."""
    return f"{name}: {text[0].lower()}{text[1:]}" if name else text


def amount(value: Time) -> str:
    """Return ``4``, ``5.5``: four digits."""
    return f"{float(value):.4g}"


def percent(fraction: Time) -> str:
    """Return ``27.3 %``."""
    return f"{100 * float(fraction):.3g} %"
