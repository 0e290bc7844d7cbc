"""How serving engines write a feature draft's config.json, and which tensors they look for.

Read from the sources of vLLM 0.33 and SGLang 0.5.23. H draft hidden, E target hidden, V target vocabulary, V_d rows of
the head, n tapped layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from decode.drafts.eagle3_model import TAPS
from decode.drafts.head import FEATURE_DRAFT, SIZE

Form = Literal["flat", "speculators"]

BODY = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias",
    "attention_dropout", "mlp_bias", "initializer_range", "pretraining_tp", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "rope_parameters", "rope_theta", "num_aux_hidden_states", "target_hidden_size",
)  # fmt: skip
REQUIRED_BODY = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")


@dataclass(frozen=True)
class FeatureConfig:
    """What a config.json says of a feature draft, whichever form it has. None: it does not say.

    `taps` count as vLLM and transformers do (0: embeddings), `sglang_taps` from one layer later.
    """

    forms: tuple[Form, ...]
    body: Mapping[str, Any]
    head_rows: int | None
    taps: tuple[int, ...] | None
    sglang_taps: tuple[int, ...] | None
    norm_before_residual: bool | None

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
    """The feature draft that a config.json describes; None where it describes something else.

    Raises KeyError, TypeError or ValueError for one that is not made of what a config is made of.
    """
    forms: list[Form] = []
    if any("eagle3" in str(name).lower() for name in config.get("architectures") or ()) and "hidden_size" in config:
        forms.append("flat")
    if "speculators_config" in config or config.get("speculators_model_type") == "eagle3":
        forms.append("speculators")
    if not forms:
        return None
    body = config.get("transformer_layer_config", {}) if "speculators" in forms else config
    for_sglang = (config.get("eagle_config") or {}).get(TAPS)
    taps = config.get(TAPS)
    rows = config.get(SIZE)
    return FeatureConfig(
        forms=tuple(forms), body=body, head_rows=None if rows is None else int(rows),
        taps=None if taps is None else tuple(int(tap) for tap in taps),
        sglang_taps=None if for_sglang is None else tuple(int(tap) for tap in for_sglang),
        norm_before_residual=config.get("norm_before_residual"),
    )  # fmt: skip


def tensor_shapes(found: FeatureConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that both engines load for such a draft."""
    body, taps = found.body, len(found.all_taps or (0, 0, 0))
    width, inner = int(body["hidden_size"]), int(body["intermediate_size"])
    heads = int(body["num_attention_heads"]) * found.head_width
    groups = int(body.get("num_key_value_heads") or body["num_attention_heads"]) * found.head_width
    features = int(body.get("target_hidden_size") or width)
    rows = found.head_rows or found.vocabulary
    layer = {
        "self_attn.q_proj": (heads, 2 * width), "self_attn.k_proj": (groups, 2 * width),
        "self_attn.v_proj": (groups, 2 * width), "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        "input_layernorm": (width,), "hidden_norm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    shapes = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (width, taps * features), "norm.weight": (width,), "lm_head.weight": (rows, width)}
    if rows < found.vocabulary:
        shapes |= {"d2t": (rows,), "t2d": (found.vocabulary,)}
    return shapes


def engine_name(tensor: str) -> str:
    """A tensor's name as in `tensor_shapes`: engines take `midlayer.` for `layers.0.`."""
    return tensor.replace("midlayer.", "layers.0.", 1)


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's form: the Llama fields at the top, RoPE's base where either generation of transformers looks for it."""
    return {**config, "architectures": [FEATURE_DRAFT], "rope_theta": config["rope_parameters"]["rope_theta"]}


def speculators_config(config: Mapping[str, Any], target: str, architectures: list[str], gamma: int) -> dict[str, Any]:
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
