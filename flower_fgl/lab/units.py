"""Units of quantities that tables and figures show."""

__all__ = ["scale_bytes", "show_bytes", "show_seconds"]

NBSP = "\u00a0"


def scale_bytes(largest: float) -> tuple[float, str]:
    """Return bytes per unit, and the unit (B to TB), for bytes in three digits."""
    rounded = float(f"{largest:.3g}")  # 999,600 bytes are shown as 1 MB, not 1e+03 kB
    for factor, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if rounded >= factor:
            return factor, name
    return 1.0, "B"


def show_bytes(num_bytes: float) -> str:
    """Format bytes in decimal units."""
    factor, unit = scale_bytes(num_bytes)
    digits = ".0f" if unit == "B" else ".3g"
    return f"{num_bytes / factor:{digits}}{NBSP}{unit}"


def show_seconds(value: float | None) -> str:
    """Format seconds, in milliseconds if they round to less than one second."""
    if value is None:
        return "–"
    if float(f"{value:.3g}") < 1:
        return f"{1000 * value:.3g}{NBSP}ms"
    return f"{value:.3g}{NBSP}s" if value < 100 else f"{value:.0f}{NBSP}s"
