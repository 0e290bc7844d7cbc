"""How serving engines write a feature draft's config.json, and which tensors they look for.

Read from the sources of vLLM 0.33 and SGLang 0.5.23; `make engine-check` runs vLLM 0.32. H draft hidden, E target
hidden, V target vocabulary, V_d rows of the head, n tapped layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from decode.drafts.feature_config import OTHERWISE, TAPS
from decode.drafts.head import FEATURE_DRAFT, SIZE

Form = Literal["flat", "speculators"]

BODY = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias",
    "attention_dropout", "mlp_bias", "initializer_range", "pretraining_tp", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "rope_parameters", "rope_theta", "num_aux_hidden_states", "target_hidden_size",
)  # fmt: skip
REQUIRED_BODY = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
OTHER_KINDS = ("dflash", "dspark", "peagle", "medusa", "mtp", "eagle2", "mlp_speculator")


@dataclass(frozen=True)
class FeatureConfig:
    """What a config.json says of an EAGLE-3 draft, whichever form it has. None: it does not say.

    `taps` count as vLLM and transformers do (0: embeddings), `sglang_taps` from one layer later. `toggles` are the
    computations that it asks for beside ours.
    """

    forms: tuple[Form, ...]
    body: Mapping[str, Any]
    head_rows: int | None
    taps: tuple[int, ...] | None
    sglang_taps: tuple[int, ...] | None
    target_width: int
    toggles: frozenset[str]

    @property
    def vocabulary(self) -> int:
        return int(self.body["vocab_size"])

    @property
    def head_width(self) -> int:
        return int(self.body.get("head_dim") or self.body["hidden_size"] // self.body["num_attention_heads"])

    @property
    def all_taps(self) -> tuple[int, ...] | None:
        """The layers it reads, by whichever list names them."""
        shifted = None if self.sglang_taps is None else tuple(tap + 1 for tap in self.sglang_taps)
        return self.taps or shifted

    @property
    def rope_base(self) -> float | None:
        parameters = self.body.get("rope_parameters") or {}
        return parameters.get("rope_theta", self.body.get("rope_theta"))


def read_feature_config(config: Mapping[str, Any]) -> FeatureConfig | None:
    """The EAGLE-3 draft that a config.json describes; None where it describes something else.

    Raises KeyError, TypeError, ValueError or AttributeError for one that is not made of what a config is made of.
    """
    forms: list[Form] = []
    if any("eagle3" in str(name).lower() for name in config.get("architectures") or ()) and "hidden_size" in config:
        forms.append("flat")
    if config.get("speculators_model_type") == "eagle3":
        forms.append("speculators")
    if not forms:
        return None
    body = dict(config["transformer_layer_config"] if "speculators" in forms else config)
    for_sglang = (config.get("eagle_config") or {}).get(TAPS)
    taps, rows = config.get(TAPS), config.get(SIZE)
    width = config.get("target_hidden_size") or body.get("target_hidden_size") or body.get("hidden_size", 0)
    return FeatureConfig(
        forms=tuple(forms), body=body, head_rows=None if rows is None else int(rows),
        taps=None if taps is None else tuple(int(tap) for tap in taps),
        sglang_taps=None if for_sglang is None else tuple(int(tap) for tap in for_sglang), target_width=int(width),
        toggles=frozenset(name for name in OTHERWISE if config.get(name) or body.get(name)),
    )  # fmt: skip


def other_kind(config: Mapping[str, Any]) -> str | None:
    """The name of a kind of draft that engines know and that is looked at no further here."""
    named = [config.get("speculators_model_type"), *(config.get("architectures") or ())]
    return next((str(name) for name in named if any(kind in str(name).lower() for kind in OTHER_KINDS)), None)


def tensor_shapes(found: FeatureConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the engines load for such a draft."""
    body, taps = found.body, len(found.all_taps or (0, 0, 0))
    width, inner = int(body["hidden_size"]), int(body["intermediate_size"])
    heads = int(body["num_attention_heads"]) * found.head_width
    groups = int(body.get("num_key_value_heads") or body["num_attention_heads"]) * found.head_width
    rows, features = found.head_rows or found.vocabulary, taps * found.target_width
    layer = {
        "self_attn.q_proj": (heads, 2 * width), "self_attn.k_proj": (groups, 2 * width),
        "self_attn.v_proj": (groups, 2 * width), "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        "input_layernorm": (width,), "hidden_norm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    if body.get("model_type") == "qwen3":
        layer |= {"self_attn.q_norm": (found.head_width,), "self_attn.k_norm": (found.head_width,)}
    shapes = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (width, features), "norm.weight": (width,), "lm_head.weight": (rows, width)}
    if "norm_before_fc" in found.toggles:
        shapes["input_norm.weight"] = (features,)
    if {"fc_norm", "use_aux_norm"} & found.toggles:
        shapes |= {f"fc_norm.{i}.weight": (found.target_width,) for i in range(taps)}
    if rows < found.vocabulary:
        shapes |= {"d2t": (rows,), "t2d": (found.vocabulary,)}
    return shapes


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's form: the Llama fields at the top, RoPE's base where either generation of transformers looks for it."""
    return {**config, "architectures": [FEATURE_DRAFT], "rope_theta": config["rope_parameters"]["rope_theta"]}


def speculators_form(config: Mapping[str, Any], target: str, architectures: list[str], gamma: int) -> dict[str, Any]:
    """vLLM's form (speculators): the layer's fields under a name of their own.

    The flat fields stay beside it, so that the folder is still a draft for our decoder.
    """
    flat = flat_config(config)
    body = {name: flat[name] for name in BODY if flat.get(name) is not None}
    return flat | {
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy", "speculative_tokens": gamma, "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "transformer_layer_config": body | {"architectures": ["LlamaForCausalLM"], "torch_dtype": config.get("dtype")},
        "norm_before_residual": False,  # left out it means true
    }  # fmt: skip
