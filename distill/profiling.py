"""What decoding costs on this machine with a target and drafts of several shapes, before any of them is trained."""

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from rich.progress import track

from configs.errors import UserError
from configs.provenance import provenance
from decode.drafts.contract import Draft
from decode.encoder_decoder import EncoderDecoder
from decode.generation import Settings
from decode.laws import Law
from decode.models import Loaded
from distill.shape import DraftSettings, make_draft, make_drafter
from eval.footprint import flop_per_token
from eval.latency import ROUNDS, Latency, Widths, batched, fastest_threads, profile
from eval.profile_file import LatencyProfile, ShapeCost, TargetFacts

MANY_ROWS = 32
GAMMA = 3  # of the rounds in which c and o are measured
HEADS = (4096, 8192, 16384)
DEPTHS = (1, 2, 4)


def usual_shapes(target: Loaded) -> dict[str, DraftSettings]:
    """Feature drafts with heads of several sizes; causal LMs of some of its layers, and one of half its width."""
    vocabulary = len(target.tokenizer)
    config = target.model.config
    has_encoder = config.is_encoder_decoder  # then drafts are whole models of their own
    heads = [] if has_encoder else [size for size in HEADS if size < vocabulary]
    shapes = {f"eagle3, head {size}": DraftSettings(kind="eagle3", vocabulary=size) for size in heads}
    shapes |= {} if has_encoder else {"eagle3, whole head": DraftSettings(kind="eagle3")}
    depth = config.num_decoder_layers if has_encoder else config.num_hidden_layers
    for layers in (d for d in DEPTHS if d < depth):
        chosen = (*range(layers - 1), -1)
        for size in [*heads[1:2], 0]:
            name = f"lm, {layers} layer{'s' * (layers > 1)}, {f'head {size}' if size else 'whole head'}"
            shapes[name] = DraftSettings(kind="lm", layers=chosen, vocabulary=size)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.hidden_size // head // 2 * head
    if width:
        name = f"lm from scratch, 2 layers of width {width}, whole head"
        shapes[name] = DraftSettings(kind="lm", init="scratch", depth=2, width=width)
    return shapes


def measure_profile(
    target: Loaded, draft: Draft[Any] | None, shapes: dict[str, DraftSettings], law: Law, context: int,
    batches: Sequence[int], longest: int, threads: int, settings: dict[str, Any],
) -> LatencyProfile:  # fmt: skip
    """Times at a text of `context` tokens, under `law`. Without a `draft` the first of `shapes` stands for it.

    Raises UserError for a context that the target does not hold.
    """
    if context + longest + ROUNDS + GAMMA + 1 > target.context_tokens:
        raise UserError(f"--context {context}: the target holds {target.context_tokens} tokens, rounds included")
    ids = _some_text(target, context)
    decoding = Settings(law, seed=0)
    threads = threads or fastest_threads(target.model, ids, decoding)
    if target.model.device.type == "cpu":
        torch.set_num_threads(threads)
    costs: list[ShapeCost] = []
    chosen = draft
    for name, shape in track(shapes.items(), "shapes") if shapes else ():
        try:
            one = untrained(target, shape)
        except UserError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
            continue
        costs.append(_shape_cost(name, shape, one, profile(target.model, one, ids, decoding, GAMMA, GAMMA)))
        chosen = chosen or one
    if chosen is None:
        raise UserError(f"{target.name}: no usual shape of draft can be made for it; name a --draft")
    alone = profile(target.model, chosen, ids, decoding, GAMMA, longest)
    return LatencyProfile(
        target=_target_facts(target, ids),
        latency=alone,
        batches={batch: batched(target.model, chosen, ids, batch, longest, alone) for batch in batches if batch > 1},
        shapes=costs,
        settings=settings
        | {"threads": threads, "target_revision": target.revision, "context": context, "temperature": law.temperature},
        provenance=provenance() | {"device": str(target.model.device)},
    )


def _some_text(target: Loaded, tokens: int) -> list[int]:
    """Random ids; for an encoder–decoder target a whole source."""
    ids = torch.randint(0, len(target.tokenizer), (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    if isinstance(target.model, EncoderDecoder):
        end = target.model.source_end
        ids = [token if token != end else end + 1 for token in ids[:-1]] + [end]
    return ids


def _shape_cost(name: str, shape: DraftSettings, draft: Draft[Any], latency: Latency) -> ShapeCost:
    return ShapeCost(
        name=name,
        draft=shape.model_dump(mode="json", exclude_defaults=True),
        c=latency.c,
        c_ci=latency.intervals["c"],
        o=latency.o,
        weights=sum(weight.numel() for weight in draft.model.parameters()),
        flop=flop_per_token(draft.model),
    )


def _target_facts(target: Loaded, ids: list[int]) -> TargetFacts:
    """Paces with many rows at once, as answers and the cache are made."""
    widths = Widths(target.model, ids, MANY_ROWS)
    step_s = median(widths.seconds(1) for _ in range(5))
    read_s = median(Widths(target.model, ids, MANY_ROWS).read_s for _ in range(3))
    return TargetFacts(
        flop=flop_per_token(target.model),
        vocabulary=target.model.config.vocab_size,
        hidden_size=target.model.config.hidden_size,
        generated_tokens_per_s=MANY_ROWS / step_s,
        read_tokens_per_s=MANY_ROWS * len(ids) / read_s,
    )


def untrained(target: Loaded, shape: DraftSettings) -> Draft[Any]:
    """A draft of this shape as it is before training, in the target's dtype; its head's ids are the lowest."""
    drafted = make_draft(shape, target, [], seed=0)
    drafted = drafted.to(target.model.dtype).to(target.model.device).eval()
    return make_drafter(shape, drafted, target)
