import copy
import json
import os
from pathlib import Path

import pytest

from config_files import FILES, IDS, K2, K3_FILE, K31_FILE, LINEAR, THINKING, yarn
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.config_file import load_config
from kimi_runtime.spec.model import KIMI_NANO
from kimi_runtime.spec.published import (
    FP8_BLOCKS,
    INT4_EXPERTS,
    K2_THINKING,
    K3,
    K26,
    KIMI_LINEAR_48B,
    MXFP4_EXPERTS,
    QUARK_MXFP4,
    k2_0711,
    k31_pro,
)

REPOSITORY = Path(__file__).parents[3]


def data_file(name):
    """A file of the shared data set; a skip that says where it was looked for."""
    folder = Path(os.environ.get("KIMISTACK_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / name).is_file():
        pytest.skip(f"{folder / name} is not there; KIMISTACK_DATA names another data folder")
    return folder / name


def without(document, *path):
    document = copy.deepcopy(document)
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    del owner[path[-1]]
    return document


def changed(document, value, *path):
    document = copy.deepcopy(document)
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return document


def test_a_real_k26_file_is_the_published_model():
    loaded = load_config(data_file("kimi-tokenizer/config.json"), name="kimi-k2.6")
    assert loaded == K26


def test_each_familys_file_is_the_published_model():
    assert load_config(K2, name="kimi-k2-0711") == k2_0711(norm_eps=1e-5)
    assert load_config(THINKING, name="kimi-k2-thinking") == K2_THINKING
    assert load_config(LINEAR, name="kimi-linear-48b-a3b") == KIMI_LINEAR_48B
    assert load_config(K3_FILE, name="kimi-k3") == K3


def test_k31_is_k3_with_an_indexer():
    loaded = load_config(K31_FILE, name="kimi-k3.1-pro")
    assert loaded == k31_pro(
        tied_embeddings=False,
        bos_id=163584,
        eos_ids=(163586,),
        pad_id=163839,
        quantisation=MXFP4_EXPERTS,
        vision=K3.vision,
    )


def test_nano_can_be_written_as_a_file_of_its_family(tmp_path):
    nano = {
        **K2,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 2304,
        "bos_token_id": 2048,
        "eos_token_id": 2050,
        "pad_token_id": 2303,
        "max_position_embeddings": 32768,
        "rope_scaling": yarn(8.0),
        "quantization_config": None,
    }
    folder = tmp_path / "kimi-nano"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(nano))
    assert load_config(folder) == load_config(folder / "config.json") == KIMI_NANO


# Only checked where given, since one value is implemented; or absent means something.
GUARDED = {"moe_layer_freq", "topk_method", "scoring_func", "moe_router_activation_func"}
GUARDED |= {"merge_type", "pos_emb_type", "norm_type", "attn_bias", "linear_bias"}
GUARDED |= {
    "text_hidden_size",
    "init_pos_emb_width",
    "mm_hidden_size",
    "pos_emb_interpolation_mode",
}
OPTIONAL = {"q_lora_rank", "quantization_config", "vision_config", "rope_scaling", "targets"}
# The loader names what encloses these, or the newer name.
RENAMED = {"group_0", "type"}


def keys_that_matter():
    """Every key of every file without which something else would be computed."""
    for family, document in FILES.items():
        nested = "text_config" in document
        pending = [((), document)]
        while pending:
            path, node = pending.pop()
            for key, value in node.items():
                where = (*path, key)
                if isinstance(value, dict):
                    pending.append((where, value))
                inner = path == ("text_config",)
                either = nested and (key in IDS or key == "tie_word_embeddings")
                unused = inner and key in ("model_type", "model_max_length")
                fixed_act = key == "hidden_act" and family in ("k2", "thinking")
                scale = key == "symmetric" and family in ("k3", "k31")
                skipped = key in GUARDED | OPTIONAL | RENAMED
                if not (skipped or either or unused or fixed_act or scale):
                    yield pytest.param(document, where, id=f"{family}:{'.'.join(where)}")


@pytest.mark.parametrize(("document", "path"), list(keys_that_matter()))
def test_a_missing_key_is_named_with_its_place_and_file(tmp_path, document, path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(without(document, *path)))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert ".".join(path) in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("document", "path", "value", "message"),
    [
        (K2, ("model_type",), "llama", r"model_type .* 'llama'.*kimi_k2, kimi_k25"),
        (K2, ("hidden_size",), "7168", r"hidden_size .* '7168'; it must be a whole number"),
        (K2, ("hidden_size",), 7168.0, r"whole number"),
        (K2, ("hidden_size",), True, r"whole number"),
        (K2, ("rms_norm_eps",), "tiny", r"rms_norm_eps .* a number"),
        (K2, ("norm_topk_prob",), 1, r"norm_topk_prob .* true or false"),
        (K2, ("scoring_func",), "softmax", r"scoring_func .* 'sigmoid', the only value"),
        (K2, ("topk_method",), "greedy", r"topk_method .* 'noaux_tc'"),
        (K2, ("moe_layer_freq",), 2, r"moe_layer_freq"),
        (K2, ("attention_bias",), True, r"attention_bias"),
        (K2, ("hidden_act",), "gelu", r"hidden_act"),
        (K2, ("num_experts_per_tok",), 385, r"describe a model: .*top_k 385 of only 384"),
        (K2, ("rope_scaling", "type"), "linear", r"rope_scaling\.type .* yarn"),
        (K2, ("rope_scaling", "factor"), 0.5, r"describe a model: .*greater than or equal to 1"),
        (K2, ("rope_scaling",), [], r"rope_scaling .* an object"),
        (K2, ("eos_token_id",), [1, "x"], r"eos_token_id .* list of whole numbers"),
        (K2, ("quantization_config", "quant_method"), "gptq", r"compressed-tensors, quark or fp8"),
        (K2, ("quantization_config", "weight_block_size"), [128, 64], r"two equal sides"),
        (LINEAR, ("mla_use_nope",), False, r"mla_use_nope .* rotated"),
        (LINEAR, ("hidden_act",), "relu", r"hidden_act .* silu or situ"),
        (LINEAR, ("linear_attn_config", "kda_layers"), [1, 2], r"kda_layers .* every layer once"),
        (LINEAR, ("linear_attn_config", "kda_layers"), 3, r"kda_layers .* list of whole numbers"),
        (K3_FILE, ("vision_config", "text_hidden_size"), 4096, r"text_hidden_size .* 7168"),
        (K3_FILE, ("vision_config", "mm_projector_type"), "mlp", r"patchmerger or patchmergerv2"),
        (K3_FILE, ("vision_config", "merge_kernel_size"), [2, 3], r"two equal sides"),
        (K3_FILE, ("vision_config", "vt_num_attention_heads"), 7, r"a divisor of 1536"),
        (K3_FILE, ("text_config",), "x", r"text_config .* an object"),
    ],
)
def test_a_value_that_cannot_be_served_is_refused(document, path, value, message):
    with pytest.raises(ConfigError, match=message):
        load_config(changed(document, value, *path))


def test_the_end_of_a_turn_always_ends_a_generation(tmp_path):
    assert load_config(K2).eos_ids == (163586, 163585)
    (tmp_path / "config.json").write_text(json.dumps(K2))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [163586, 163593]}))
    assert load_config(tmp_path).eos_ids == (163586, 163585, 163593)


def test_ids_outside_the_official_blocks_are_left_alone():
    foreign = {**K2, "bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0}
    assert load_config(foreign).eos_ids == (7,)


def test_the_latent_norms_eps_is_the_callers_choice():
    assert load_config(K2).latent_norm_eps == 1e-6
    assert load_config(K2, latent_norm_eps=1e-5).latent_norm_eps == 1e-5


def test_rope_is_read_as_transformers_5_writes_it():
    document = without(without(K2, "rope_scaling"), "rope_theta")
    document["rope_parameters"] = {**yarn(32.0), "rope_theta": 50000.0}
    assert load_config(document).rope == load_config(K2).rope
    document["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    assert load_config(document).rope.yarn is None


def test_a_missing_or_broken_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        load_config(tmp_path / "nowhere.json")
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="is not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list, not a JSON object"):
        load_config(tmp_path)


def test_ignore_lists_decide_which_parts_are_quantised():
    assert load_config(THINKING).quantisation == INT4_EXPERTS
    assert load_config(K2).quantisation == FP8_BLOCKS
    everything = changed(THINKING, ["lm_head"], "quantization_config", "ignore")
    assert load_config(everything).quantisation.parts == FP8_BLOCKS.parts
    nothing = changed(THINKING, ["re:.*"], "quantization_config", "ignore")
    with pytest.raises(ConfigError, match="ignores every part"):
        load_config(nothing)
    broken = changed(THINKING, ["re:("], "quantization_config", "ignore")
    with pytest.raises(ConfigError, match="quantization_config"):
        load_config(broken)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"type": "float", "num_bits": 8, "group_size": 32}, "8-bit float weights in groups of 32"),
        ({"type": "int", "num_bits": 4, "group_size": 128}, "groups of 128"),
        ({"type": "int", "num_bits": 4, "group_size": 32, "symmetric": False}, "zero points"),
    ],
)
def test_a_weight_format_that_is_not_implemented_is_refused(weights, message):
    document = changed(
        THINKING, weights, "quantization_config", "config_groups", "group_0", "weights"
    )
    with pytest.raises(ConfigError, match=message):
        load_config(document)


def quark(**extra):
    section = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}},
        "exclude": ["*self_attn*", "*mlp.gate", "*lm_head", "*vision_tower*"],
    }
    return {**THINKING, "quantization_config": section | extra}


def test_amds_quark_checkpoints_load():
    assert load_config(quark()).quantisation == QUARK_MXFP4
    attention = {"*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}}
    mixed = load_config(quark(layer_quant_config=attention)).quantisation
    assert mixed == QUARK_MXFP4.model_copy(update={"attention_format": "fp8_channel"})


def test_a_quark_recipe_that_is_not_implemented_is_refused():
    with pytest.raises(ConfigError, match="dtype"):
        load_config(quark(global_quant_config={"weight": {"dtype": "int8", "group_size": 32}}))
    experts = {"*experts*": {"weight": {"dtype": "fp8_e4m3"}}}
    with pytest.raises(ConfigError, match="only attention"):
        load_config(quark(layer_quant_config=experts))
    attention = {"*self_attn*": {"weight": {"dtype": "int8"}}}
    with pytest.raises(ConfigError, match="fp8_e4m3"):
        load_config(quark(layer_quant_config=attention))
