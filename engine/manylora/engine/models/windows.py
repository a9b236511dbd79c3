"""Which layers see only a window of the keys, from a config's several ways to say it."""

from collections.abc import Sequence

from manylora.engine.models.fields import Fields

Windows = Sequence[int | None]


def no_windows(f: Fields) -> Windows:
    """Every layer sees every key."""
    return [None] * f.size("num_hidden_layers")


def one_window(f: Fields, *, used: bool = True) -> Windows:
    """The same `sliding_window`, or none, in every layer.

    Raises:
        ModelError: `layer_types` says otherwise.
    """
    window = f.optional_size("sliding_window") if used else None
    windows = [window for _ in no_windows(f)]
    if f.has("layer_types") and windows_by_layer_type(f, []) != windows:
        raise f.error("layer_types", "is not supported for this model_type")
    return windows


def last_windows(f: Fields) -> Windows:
    """`sliding_window` from layer `max_window_layers` on, if `use_sliding_window` (Qwen).

    Raises:
        ModelError: `layer_types` asks for windows that are not used.
    """
    used = f.flag("use_sliding_window")
    first = f.count("max_window_layers")
    return windows_by_layer_type(
        f, [used and i >= first for i in range(f.size("num_hidden_layers"))], used=used
    )


def windows_by_layer_type(f: Fields, otherwise: Sequence[bool], *, used: bool = True) -> Windows:
    """`sliding_window` where `layer_types` says so, or without it where `otherwise` does.

    Raises:
        ModelError: `layer_types` names another kind, or a window is missing or not `used`.
    """
    slides = list(otherwise)
    if f.has("layer_types"):
        types = f.items("layer_types", f.size("num_hidden_layers"))
        if not all(kind in ("full_attention", "sliding_attention") for kind in types):
            raise f.error("layer_types", "names a kind that is not supported")
        slides = [kind == "sliding_attention" for kind in types]
    if any(slides) and not used:
        raise f.error("layer_types", "asks for windows, and use_sliding_window does not")
    window = f.size("sliding_window") if any(slides) else None
    return [window if slide else None for slide in slides]
