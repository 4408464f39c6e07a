"""The `quantization_config` of a checkpoint: which parts of a model have which number format."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.config_section import ConfigSection
from kimi_runtime.spec.model import QuantFormat, QuantPart, QuantSpec

# One module of each part, under the names of both checkpoint styles. An ignore list that covers
# one of them covers the part; no known checkpoint quantises half a part.
_SAMPLES: dict[QuantPart, tuple[str, ...]] = {
    "routed_experts": ("mlp.experts.0.gate_proj", "block_sparse_moe.experts.0.w1"),
    "shared_experts": (
        "mlp.shared_experts.gate_proj",
        "block_sparse_moe.shared_experts.gate_proj",
    ),
    "dense_ffn": ("mlp.gate_proj",),
    "attention": ("self_attn.o_proj", "self_attn.kv_b_proj"),
}


def read_quantisation(config: ConfigSection) -> QuantSpec | None:
    """The section's `quantization_config`; None where weights are plain. ConfigError if unknown."""
    if not config.has("quantization_config"):
        return None
    section = config.section("quantization_config")
    method = section.text("quant_method")
    match method:
        case "compressed-tensors":
            return _compressed_tensors(section)
        case "quark":
            return _quark(section)
        case "fp8":
            return _fp8(section)
    raise section.wrong("quant_method", "compressed-tensors, quark or fp8")


def _compressed_tensors(section: ConfigSection) -> QuantSpec:
    groups = section.section("config_groups")
    if len(groups.data) != 1:
        raise section.wrong("config_groups", "one group: a mixture is not implemented")
    weights = groups.section(next(iter(groups.data))).section("weights")
    kind = (weights.text("type"), weights.integer("num_bits"), weights.integer("group_size"))
    formats: dict[tuple[str, int, int], QuantFormat] = {
        ("int", 4, 32): "int4",
        ("float", 4, 32): "mxfp4",
    }
    if kind not in formats:
        raise ConfigError(
            f"{section.source} has {kind[1]}-bit {kind[0]} weights in groups of {kind[2]}; "
            "compressed-tensors is read with 4-bit int or float weights in groups of 32"
        )
    if kind[0] == "int" and not weights.boolean("symmetric"):
        raise weights.wrong("symmetric", "true: zero points are not implemented")
    ignored = _matcher(section, section.texts("ignore"))
    return QuantSpec(
        method="compressed-tensors",
        format=formats[kind],
        group=kind[2],
        parts=_parts_left(section, ignored),
    )


def _quark(section: ConfigSection) -> QuantSpec:
    weights = section.section("global_quant_config").section("weight")
    if weights.text("dtype") not in ("fp4", "mxfp4"):
        raise weights.wrong("dtype", "fp4: the quark checkpoints of Kimi models are MXFP4")
    ignored = _matcher(section, section.texts("exclude"))
    attention: QuantFormat | None = None
    if section.has("layer_quant_config"):
        layers = section.section("layer_quant_config")
        for pattern in layers.data:
            if "self_attn" not in pattern:
                raise layers.wrong(pattern, "absent: only attention may have its own format")
            dtype = layers.section(pattern).section("weight").text("dtype")
            if dtype not in ("fp8_e4m3", "fp8"):
                raise layers.section(pattern).section("weight").wrong("dtype", "fp8_e4m3")
            attention = "fp8_channel"
    parts = _parts_left(section, ignored)
    if attention is not None:
        parts = tuple(part for part in parts if part != "attention")
    return QuantSpec(
        method="quark",
        format="mxfp4",
        group=weights.integer("group_size"),
        parts=parts,
        attention_format=attention,
    )


def _fp8(section: ConfigSection) -> QuantSpec:
    block = section.integers("weight_block_size")
    if len(block) != 2 or block[0] != block[1]:
        raise section.wrong("weight_block_size", "two equal sides")
    return QuantSpec(method="fp8", format="fp8_block", group=block[0], parts=tuple(_SAMPLES))


def _matcher(section: ConfigSection, patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a module is on an ignore list: regular expressions after `re:`, else wildcards."""
    try:
        expressions = [re.compile(text[3:]) for text in patterns if text.startswith("re:")]
    except re.error as exc:
        raise ConfigError(f"{section.prefix}ignore in {section.source}: {exc}") from exc
    wildcards = [text for text in patterns if not text.startswith("re:")]

    def ignored(module: str) -> bool:
        return any(expression.match(module) for expression in expressions) or any(
            fnmatchcase(module, wildcard) for wildcard in wildcards
        )

    return ignored


def _parts_left(section: ConfigSection, ignored: Callable[[str], bool]) -> tuple[QuantPart, ...]:
    names = {
        part: [
            f"{root}model.layers.{layer}.{name}"
            for root in ("", "language_model.")
            for layer in (0, 1)
            for name in samples
        ]
        for part, samples in _SAMPLES.items()
    }
    left = tuple(part for part, modules in names.items() if not any(map(ignored, modules)))
    if not left:
        raise ConfigError(
            f"{section.prefix[:-1]} in {section.source} ignores every part of the model; "
            "drop the section if the weights are not quantised"
        )
    return left
