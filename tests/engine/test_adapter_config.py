"""`adapter_config.json`: ranks and scales by PEFT's own rules, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from manylora.engine.adapter_config import AdapterConfig
from manylora.engine.errors import AdapterError

PATH = "model.layers.1.self_attn.q_proj"
MANY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(folder: Path, raw: object) -> AdapterConfig:
    path = folder / "adapter_config.json"
    path.write_bytes(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    return AdapterConfig.read(path)


def config(**values: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **values}


def reasons(folder: Path, raw: object) -> tuple[str, ...]:
    with pytest.raises(AdapterError) as caught:
        read(folder, raw)
    return caught.value.reasons


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_all_that_peft_writes_by_default_is_taken(tmp_path: Path, init: bool | str) -> None:
    LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=init
    ).save_pretrained(tmp_path)

    settings = AdapterConfig.read(tmp_path / "adapter_config.json")

    assert (settings.rank(PATH), settings.scale(PATH)) == (4, 1.5)


def test_the_scale_of_rslora_is_alpha_over_the_root_of_the_modules_own_rank(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        config(
            use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"1.self_attn.q_proj": 3}
        ),
    )

    assert settings.scale(PATH) == 3 / 2
    assert settings.scale("model.layers.1.mlp.up_proj") == 16 / math.sqrt(8)


names = st.sampled_from(["q_proj", "self_attn", "layers", "1", "model", "proj", "q", "11", "self"])
keys = st.lists(names, min_size=1, max_size=3).map(".".join) | st.just("1.self.attn.q.proj")


@MANY
@given(pattern=st.dictionaries(keys, st.integers(1, 64), max_size=4), layer=st.integers(0, 11))
def test_a_pattern_says_of_a_module_what_it_says_to_peft(
    tmp_path: Path, pattern: dict[str, int], layer: int
) -> None:
    path = PATH.replace("1", str(layer))

    settings = read(tmp_path, config(rank_pattern=pattern, alpha_pattern=pattern))

    expected = pattern.get(get_pattern_key(list(pattern), path))
    assert settings.rank(path) == (expected or 8)
    assert settings.scale(path) * settings.rank(path) == pytest.approx(expected or 16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"use_dora": True}, "use_dora is set"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"target_parameters": ["x"]}, "target_parameters is set"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'"),
        ({"something_new": {"x": 1}}, "something_new is set"),
        ({"r": 0}, "r 0 is not"),
        ({"r": 8.0}, "r 8.0 is not"),
        ({"r": True}, "r True is not"),
        ({"lora_alpha": "16"}, "lora_alpha '16' is not"),
        ({"lora_alpha": math.nan}, "lora_alpha nan is not"),
        ({"lora_alpha": math.inf}, "lora_alpha inf is not"),
        ({"lora_alpha": 10**400}, "is not a positive number"),
        ({"use_rslora": "false"}, "use_rslora is not true or false"),
        ({"rank_pattern": [1]}, "rank_pattern is not an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: 'q_proj'"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: 'q_proj'"),
        ({"rank_pattern": {f"{i}": 1 for i in range(5000)}}, "rank_pattern has 5000 keys"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern: key '(a+)+$'"),
        ({"alpha_pattern": {"q_proj\n": 1}}, "alpha_pattern: key 'q_proj\\n'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_names_the_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (reason,) = reasons(tmp_path, config(**change))

    assert said in reason


@pytest.mark.parametrize("name", ["r", "lora_alpha"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    raw = config()
    del raw[name]

    assert reasons(tmp_path, raw) == (f"{name} is missing from adapter_config.json",)


def test_every_reason_is_given(tmp_path: Path) -> None:
    assert len(reasons(tmp_path, {"use_dora": True, "bias": "all", "r": -1})) == 4


def test_unknown_fields_that_are_empty_are_taken_and_reported(tmp_path: Path) -> None:
    settings = read(tmp_path, config(something_new=None, revision="main", r=8))

    assert settings.ignored == ("revision", "something_new")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe\xff",
        b"[" * 100_000,
        b'{"r": ' + b"9" * 5000 + b"}",
        b" " * ((1 << 20) + 1),
        b'{"r": 8, "lora_alpha": 8, "base_model_name_or_path": "\\ud800"}',
        b'{"r": 8, "lora_alpha": 8, "\\ud800": null}',
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (reason,) = reasons(tmp_path, content)

    assert reason.startswith("adapter_config.json is")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
        AdapterConfig.read(tmp_path / "adapter_config.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
FIELDS = ("peft_type", "bias", "use_rslora", "rank_pattern", "init_lora_weights", "base_model", "x")


@MANY
@given(st.dictionaries(st.sampled_from(FIELDS) | st.sampled_from(["r", "lora_alpha"]), json_values))
def test_any_json_is_taken_or_refused_with_reasons(tmp_path: Path, changes: dict[str, Any]) -> None:
    try:
        settings = read(tmp_path, config(**changes))
    except AdapterError as error:
        assert error.reasons  # noqa: PT017 -- either outcome is right
    else:
        assert settings.rank(PATH) >= 1
        assert settings.scale(PATH) > 0


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (["q_proj"], True),
        (["self_attn.q_proj", "k_proj"], True),
        ([PATH], True),
        (["k_proj"], False),
        (["proj"], False),
        (["attn.q_proj"], False),
        ("all-linear", True),
        (r".*q_proj", True),
        (r"q_proj", False),
        (None, True),
    ],
    ids=str,
)
def test_target_modules_name_a_module_as_they_do_to_peft(
    tmp_path: Path, targets: object, named: bool
) -> None:
    assert read(tmp_path, config(target_modules=targets)).targets(PATH) is named


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([], "target_modules is empty"),
        (["q_proj"] * 2000, "target_modules has 2000 entries"),
        ([1], "target_modules is neither"),
        ({"q_proj": 1}, "target_modules is neither"),
        ("(", "target_modules is not a regular expression"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_target_modules_of_another_kind_are_refused(
    tmp_path: Path, targets: object, said: str
) -> None:
    assert said in reasons(tmp_path, config(target_modules=targets))[0]


def test_an_alpha_that_no_number_format_holds_is_refused(tmp_path: Path) -> None:
    assert "lora_alpha" in reasons(tmp_path, config(lora_alpha=1e308))[0]
    assert "alpha_pattern" in reasons(tmp_path, config(alpha_pattern={"q_proj": 1e30}))[0]


def test_reasons_stay_short_whatever_stands_in_the_file(tmp_path: Path) -> None:
    hostile = {f"unknown_{i}_{'x' * 9000}": True for i in range(50)}

    found = reasons(tmp_path, config(**hostile))

    assert len(found) == 21
    assert found[-1] == "and 30 more"
    assert max(map(len, found)) < 320
