"""How numbers read."""

import math

_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
MINUS = "−"


def number(value: float, digits: int = 4) -> str:
    """So many significant digits, thousands separated, very small and very large ones with an exponent."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e15 or size < 1e-4:
        text = f"{value:.{max(min(digits, 3) - 1, 0)}e}"
        head, _, exponent = text.partition("e")
        head = head.rstrip("0").rstrip(".") if "." in head else head
        return f"{head}e{int(exponent)}".replace("-", MINUS)
    places = max(digits - 1 - math.floor(math.log10(size)), 0)
    text = f"{value:,.{places}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", MINUS)


def short(value: float, gap: str = "", digits: int = 3) -> str:
    """19k, 1.2M, 0.004, 2e−5."""
    for size, letter in _SI:
        if abs(value) >= size and (size > 1e3 or abs(value) >= 1e4):
            return f"{number(value / size, digits)}{gap}{letter}"
    return number(value, digits)


def tick(value: float) -> str:
    """The same with the digits that tell a tick from the next one; round numbers have few."""
    return short(value, digits=6)


def flop_rate(value: float) -> str:
    """1.23 PFLOP/s."""
    return f"{short(value, ' ')}FLOP/s"


def byte_count(value: float) -> str:
    """In units of 1000, as memory is told elsewhere."""
    for size, unit in _BYTES:
        if abs(value) >= size:
            return f"{number(value / size, 3)} {unit}"
    return f"{number(value, 3)} B"


def duration(seconds: float) -> str:
    """3.2 s, 4 min 10 s, 2 h 05 min, 3 d 4 h."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1e-3:
        return f"{number(seconds * 1e6, 3)} µs"
    if seconds < 1:
        return f"{number(seconds * 1e3, 3)} ms"
    if seconds < 60:
        return f"{number(seconds, 3)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def times(value: float) -> str:
    """A factor: 4.37×."""
    return f"{value:,.2f}×" if math.isfinite(value) else "–"


def times_tick(value: float) -> str:
    """The same, as short as can be: 4×."""
    return f"{number(value, 6)}×"


def percent(share: float) -> str:
    """A share of 1."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "–"


def percent_tick(share: float) -> str:
    """The same, as short as can be: 10 %."""
    return f"{number(100 * share, 6)} %"
