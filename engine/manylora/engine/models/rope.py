"""Rotary tables: the cosine and sine of every position, each scaling as transformers has it.

Everything is formed in float32 and in transformers' order of operations, in every dtype of the
model, so that the tables are the same numbers.
"""

import math

import structlog
import torch
from torch import Tensor

from manylora.engine.errors import ModelError
from manylora.engine.models.rope_config import (
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    Rope,
    Yarn,
)

logger = structlog.get_logger(__name__)


def rotary_table(rope: Rope, num_positions: int) -> Tensor:
    """[positions, size] float32: size/2 cosines, then size/2 sines, of each position.

    A scaling that depends on the length of the sequence takes it to be `num_positions` for all,
    since otherwise a longer sequence would change keys that are cached already; a log line says
    what it became.

    Raises:
        ModelError: the config's numbers give no finite angles.
    """
    try:
        frequencies, attention_factor = _frequencies(rope, num_positions)
        angles = torch.arange(num_positions, dtype=torch.float32).outer(frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
    except (OverflowError, ValueError) as error:
        raise ModelError(f"config.json: the rope's numbers cannot be computed: {error}") from error
    if not bool(torch.isfinite(table).all()):
        raise ModelError("config.json: the rope's numbers give angles that are not finite")
    return table


def _frequencies(rope: Rope, num_positions: int) -> tuple[Tensor, float]:
    """Frequencies [size/2] float32, and the factor of cosines and sines."""
    plain = 1.0 / _wavelengths(rope.theta, rope.size)
    match rope.scaling:
        case None:
            return plain, 1.0
        case Linear(factor):
            return plain / factor, 1.0
        case Llama3() as scaling:
            return _llama3(plain, scaling), 1.0
        case Yarn() as scaling:
            return _yarn(rope, scaling), scaling.attention_factor
        case DynamicNtk() as scaling:
            return 1.0 / _wavelengths(_dynamic_theta(rope, scaling, num_positions), rope.size), 1.0
        case LongRope() as scaling:
            divisors = torch.tensor(_longrope_divisors(scaling, num_positions))
            stretched = divisors * _wavelengths(rope.theta, rope.size)
            return 1.0 / stretched, scaling.attention_factor


def _wavelengths(theta: float, size: int) -> Tensor:
    """Positions in which each pair of dimensions turns by one radian."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return torch.pow(theta, exponents)


def _llama3(plain: Tensor, scaling: Llama3) -> Tensor:
    turns = scaling.original_positions / (2 * math.pi / plain)  # in the trained length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    is_low = wavelength > scaling.original_positions / low
    is_high = wavelength < scaling.original_positions / high
    share = (turns - low) / (high - low)
    blended = (1 - share) * plain / scaling.factor + share * plain
    return torch.where(is_low, plain / scaling.factor, torch.where(is_high, plain, blended))


def _yarn(rope: Rope, scaling: Yarn) -> Tensor:
    low, high = (_yarn_dimension(rope, scaling, n) for n in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rope.size // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    wavelengths = _wavelengths(rope.theta, rope.size)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_dimension(rope: Rope, scaling: Yarn, turns: float) -> float:
    """The dimension whose pair turns that often in the trained length."""
    ratio = scaling.original_positions / (turns * 2 * math.pi)
    return rope.size * math.log(ratio) / (2 * math.log(rope.theta))


def _dynamic_theta(rope: Rope, scaling: DynamicNtk, num_positions: int) -> float:
    length = max(num_positions, scaling.trained_positions)
    growth = scaling.factor * length / scaling.trained_positions - (scaling.factor - 1)
    theta = rope.theta * math.pow(growth, rope.size / (rope.size - 2))
    logger.info(
        "rope_scaling_fixed",
        rope_type="dynamic",
        max_model_len=num_positions,
        trained_positions=scaling.trained_positions,
        rope_theta=theta,
        because="it would change with each sequence's length, and cached keys with it",
    )
    return theta


def _longrope_divisors(scaling: LongRope, num_positions: int) -> tuple[float, ...]:
    is_long = num_positions > scaling.original_positions
    logger.info(
        "rope_scaling_fixed",
        rope_type="longrope",
        max_model_len=num_positions,
        trained_positions=scaling.original_positions,
        factors="long_factor" if is_long else "short_factor",
        because="it would change with each sequence's length, and cached keys with it",
    )
    return scaling.long_factor if is_long else scaling.short_factor
