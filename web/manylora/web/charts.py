"""Charts as SVG, made on the server."""

from collections.abc import Sequence

from markupsafe import Markup

WIDTH, HEIGHT = 720, 96  # in the view box's units


def bars(values: Sequence[int], labels: Sequence[str], *, title: str) -> Markup:
    """One bar for each value, the last one being now; `labels` name them in the tooltips."""
    top = max(values, default=0)
    step = WIDTH / max(len(values), 1)
    drawn = Markup("").join(
        _bar(index * step, step * 0.8, value, top, label)
        for index, (value, label) in enumerate(zip(values, labels, strict=True))
    )
    return Markup(
        '<svg class="chart" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img">'
        "<title>{title}</title><desc>Highest: {top}. All together: {total}.</desc>{drawn}</svg>"
    ).format(
        width=WIDTH,
        height=HEIGHT,
        title=title,
        top=f"{top:,}",
        total=f"{sum(values):,}",
        drawn=drawn,
    )


def bar(start: int, length: int, total: int, *, kind: str) -> Markup:
    """One interval of a waterfall, said in words beside it, and so for the eye alone."""
    scale = WIDTH / max(total, 1)
    width = max(length * scale, 2)
    return Markup(
        '<svg class="bar" viewBox="0 0 {all} 10" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="{kind}" x="{x:.1f}" y="0" width="{width:.1f}" height="10"/></svg>'
    ).format(all=WIDTH, kind=kind, x=min(start * scale, WIDTH - width), width=width)


def _bar(x: float, width: float, value: int, top: int, label: str) -> Markup:
    height = max(HEIGHT * value / top, 2) if value else 1
    return Markup(
        '<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        "<title>{label}: {value}</title></rect>"
    ).format(
        kind="some" if value else "zero",
        x=x,
        y=HEIGHT - height,
        width=width,
        height=height,
        label=label,
        value=f"{value:,}",
    )
